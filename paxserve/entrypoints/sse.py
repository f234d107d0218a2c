"""Server-sent events: a response that streams them, and notices at once when its client has gone."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients drop and proxies take for life."""

SEPARATORS = [(mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029"]
"""Ends of lines to Python's `splitlines`, and so to clients made with it, though not to the event stream's rules.
All others are control characters, which JSON escapes anyway."""

_encoder = msgspec.json.Encoder()


def event(payload: Any) -> bytes:
    """One event with a JSON payload, free of every character at which some client breaks lines."""
    text = _encoder.encode(payload)
    if b"\xc2\x85" in text or b"\xe2\x80" in text:
        for separator, escape in SEPARATORS:
            text = text.replace(separator, escape)
    return b"data: " + text + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """One event with a name, as the Responses and the Messages API have them."""
    return b"event: " + name.encode() + b"\n" + event(payload)


class EventStream(Response):
    """Sends `events` as they come; `on_close` is called once, however the stream ends."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None], keep_alive: float = 0.0
    ) -> None:
        self.events, self.keep_alive = events, keep_alive
        self.on_close = on_close
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the events or the client's interest end."""
        sender = asyncio.ensure_future(self._send_all(send))
        listener = asyncio.ensure_future(wait_disconnect(receive))
        try:
            await asyncio.wait({sender, listener}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            listener.cancel()
            self.on_close()
            await asyncio.gather(sender, listener, return_exceptions=True)
        if not sender.cancelled() and (error := sender.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.events) as events:
            chunks = with_comments(events, self.keep_alive) if self.keep_alive else events
            async with aclosing(chunks):
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def with_comments(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """The events, and a comment whenever there has been none for so many seconds."""
    pending: asyncio.Task[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events))
            await asyncio.wait({pending}, timeout=seconds)
            if not pending.done():
                yield KEEP_ALIVE
                continue
            try:
                chunk = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield chunk
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has gone (the request's body must have been read)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes first (`ClientDisconnect`)."""
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(wait_disconnect(request.receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)
