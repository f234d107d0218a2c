"""The one place where exceptions become answers, in the shape of OpenAI's errors."""

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paxserve.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}

ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

RETRY_SECONDS = "2"
"""When clients may try again a request that was not begun (429, 503)."""

MAX_SHOWN_ERRORS = 10
MAX_SHOWN_INPUT = 200
CLIENT_CLOSED_REQUEST = 499
"""The status for the log of a request whose client has gone."""

INTERNAL_ERROR = "The server failed to answer; its log says why."

SECRETS = (
    (re.compile(r"Traceback \(most recent call last\):.*", re.DOTALL), "<traceback>"),
    (re.compile(r'File "[^"\n]*", line \d+(, in \S+)?'), "<traceback>"),
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "<address>"),
    (re.compile(r"(?<![\w.:/-])/(?:[\w.@+-]+/)+[\w.@+-]*"), "<path>"),
)
"""What tells of the machine and not of the request, and what stands in its place."""


class ErrorInfo(msgspec.Struct):
    """What went wrong, for a program (`type`, `param`, `code`) and for a reader (`message`)."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not a success, and the last event of a stream that failed."""

    error: ErrorInfo


def error_body(message: str, code: int, param: str | None = None, kind: str | None = None) -> ErrorBody:
    """The error body for a status code."""
    # What a client sent may be quoted here, and need not be text that can be sent back.
    message = message.encode("utf-8", "backslashreplace").decode()
    return ErrorBody(ErrorInfo(message, kind or ERROR_TYPES.get(code, "Error"), param, code))


def without_secrets(message: str) -> str:
    """The message without paths, addresses and tracebacks, which exceptions of libraries like to have."""
    for pattern, substitute in SECRETS:
        message = pattern.sub(substitute, message)
    return message


def body_of(error: Exception) -> ErrorBody:
    """The error body for an exception; what is not meant for users is logged and not told to them."""
    if isinstance(error, RequestError):
        # The names in a 404 are those that clients are to use, even if they look like paths.
        message = error.message if error.code == 404 else without_secrets(error.message)
        return error_body(message, error.code, error.param)
    if isinstance(error, EngineDeadError):
        return error_body(without_secrets(str(error)), 500)
    logger.error("Unexpected error while answering a request", exc_info=error)
    return error_body(INTERNAL_ERROR, 500)


def error_response(body: ErrorBody, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """The answer that carries an error body, in the shape that clients of `path` know."""
    if body.error.code in (429, 503):
        headers = {"Retry-After": RETRY_SECONDS, **(headers or {})}
    shaped = anthropic_body(body) if path.startswith(ANTHROPIC_PATH) else body
    return Response(msgspec.json.encode(shaped), body.error.code, headers, "application/json")


def anthropic_body(body: ErrorBody) -> dict[str, Any]:
    """The error as Anthropic's API tells it."""
    kind = ANTHROPIC_TYPES.get(body.error.code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": body.error.message}}


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` answer in OpenAI's shape."""

    async def on_failure(request: Request, error: Exception) -> Response:
        return error_response(body_of(error), path=request.url.path)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_body(error.errors()), path=request.url.path)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path[:MAX_SHOWN_INPUT]}"
        return error_response(error_body(message, error.status_code), error.headers, path=request.url.path)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(RequestError, on_failure)
    app.add_exception_handler(EngineDeadError, on_failure)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_failure)


def validation_body(errors: Any) -> ErrorBody:
    """The error body for a request body that does not fit its fields: bounded, whatever was sent."""
    lines = []
    for error in errors[:MAX_SHOWN_ERRORS]:
        shown = {
            "type": error["type"],
            "loc": location(error),
            "msg": error["msg"][:MAX_SHOWN_INPUT],
            "input": shorten(error.get("input")),
        }
        lines.append(f"  {shown}")
    plural = "s" if len(errors) > 1 else ""
    message = f"{len(errors)} validation error{plural}:\n" + "\n".join(lines)
    return error_body(message, 400, location(errors[0]), "Bad Request")


def location(error: dict[str, Any]) -> str:
    """Where in the request an error is: `body.messages.0.role`."""
    return ".".join(str(part) for part in error["loc"])[:MAX_SHOWN_INPUT]


def shorten(value: object) -> object:
    """A value that is safe to show: long texts cut, containers as their size."""
    if isinstance(value, (list, tuple, set)):
        return f"<list of {len(value)} items>"
    if isinstance(value, dict):
        return f"<object of {len(value)} items>"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    text = str(value)
    if len(text) > MAX_SHOWN_INPUT:
        return text[:MAX_SHOWN_INPUT] + "..."
    return value
