"""POST /invocations: SageMaker's one path for every kind of request, told apart by its fields."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from paxserve.entrypoints.openai.chat_completions import create_chat_completion
from paxserve.entrypoints.openai.completions import create_completion
from paxserve.entrypoints.protocol.chat import ChatRequest
from paxserve.entrypoints.protocol.completions import CompletionRequest
from paxserve.errors import RequestError

router = APIRouter()

KINDS: dict[str, tuple[type, Callable[[Any, Request], Awaitable[Response]]]] = {
    "messages": (ChatRequest, create_chat_completion),
    "prompt": (CompletionRequest, create_completion),
}
"""The field that tells a kind of request, its body, and what answers it."""


@router.post("/invocations")
async def invoke(request: Request, body: Annotated[dict[str, Any], Body()]) -> Response:
    """Answer a chat or a completion."""
    for field, (kind, handler) in KINDS.items():
        if field in body:
            try:
                parsed = kind(**body)
            except ValidationError as error:
                raise RequestValidationError([
                    {**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()
                ]) from None  # fmt: skip
            return await handler(parsed, request)
    raise RequestError(f"The body must have one of the fields {', '.join(KINDS)}.", "body")
