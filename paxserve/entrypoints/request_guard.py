"""The limits on what a request brings: headers, size and time of its body, nesting, numbers; before a route sees it."""

import asyncio
import math
import re
from collections.abc import Iterable
from itertools import accumulate

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxserve.entrypoints.errors import error_body, error_response
from paxserve.server_config import ServerConfig

INLINE_BYTES = 256 * 2**10
"""Bodies up to this are looked through on the event loop."""

STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""JSON's strings; one without an end goes to the end of the text, so that no text takes more than one pass."""

WORDS = re.compile(rb"NaN|Infinity")
LARGE_NUMBERS = re.compile(rb"[-\d.]++[eE]\+?+\d++|[-\d.]{300,}+")
"""Numbers that may be too large for a float."""

NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
STEPS = [1 if character in b"[{" else -1 for character in range(256)]


class RequestGuard:
    """ASGI middleware that reads bodies within limits (400, 408, 413, 431), and hands them on whole."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self.max_bytes, self.seconds = config.max_request_body_bytes, config.request_body_timeout
        self.max_depth, self.max_headers = config.max_json_depth, config.h11_max_header_count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if len(scope["headers"]) > self.max_headers:
            await self.refuse(431, scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            await self.refuse(413, scope, receive, send)
            return
        try:
            messages = await asyncio.wait_for(self.read(receive), self.seconds)
        except TimeoutError:
            await self.refuse(408, scope, receive, send)
            return
        if messages is None:
            await self.refuse(413, scope, receive, send)
            return
        body = b"".join(message.get("body", b"") for message in messages)
        look = asyncio.to_thread(flaw, body, self.max_depth) if len(body) > INLINE_BYTES else None
        found = await look if look is not None else flaw(body, self.max_depth)
        if found is not None:
            await error_response(error_body(found, 400, "body", "Bad Request"), path=scope["path"])(
                scope, receive, send
            )
            return
        scope.setdefault("state", {})["body_bytes"] = len(body)
        await self.app(scope, replayed(body, messages, receive), send)

    async def read(self, receive: Receive) -> list[Message] | None:
        """All of the body, or None once it is too large; the last message may be that the client has gone."""
        messages, size = [], 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self.max_bytes:
                return None
            if not message.get("more_body"):
                return messages

    async def refuse(self, code: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer that there are too many headers (431), or that the body is too large (413) or too slow (408)."""
        text = {
            431: f"A request must have at most {self.max_headers} headers.",
            413: f"The request body must have at most {self.max_bytes} bytes.",
            408: f"The request body must arrive within {self.seconds:g} seconds.",
        }[code]
        await error_response(error_body(text, code), {"Connection": "close"}, path=scope["path"])(scope, receive, send)


def replayed(body: bytes, messages: Iterable[Message], receive: Receive) -> Receive:
    """A `receive` that gives the body in one piece, then what comes from the client."""
    is_gone = any(message["type"] == "http.disconnect" for message in messages)
    waiting = [{"type": "http.disconnect"} if is_gone else {"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


def flaw(body: bytes, max_depth: int) -> str | None:
    """What a JSON text must not have; None for one that is fine, or no JSON at all (which its route will find)."""
    if not body:
        return None
    bare = STRINGS.sub(b"", body)
    brackets = bare.translate(None, NOT_BRACKETS)
    if len(brackets) > max_depth and max(accumulate(map(STEPS.__getitem__, brackets))) > max_depth:
        return f"The request body must be nested at most {max_depth} levels deep."
    if WORDS.search(bare) or any(not is_finite(number) for number in LARGE_NUMBERS.findall(bare)):
        return "The request body must have finite numbers only."
    return None


def is_finite(number: bytes) -> bool:
    """Whether a number fits a float; what is no number is not judged here."""
    try:
        return math.isfinite(float(number))
    except ValueError:
        return True
