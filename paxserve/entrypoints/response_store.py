"""Responses that are kept to be retrieved, continued or cancelled: the newest few, in memory."""

import asyncio
import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from paxserve.errors import RequestError

MAX_CHARACTERS = 64 * 2**20
"""Most text that is kept, of all responses and the conversations before them together."""


OWNED_ID = re.compile("resp_[0-9a-f]{32}_([0-9a-f]{1,8})")


class EventLog:
    """The events of a response that is streamed from the background: whoever comes, however late, can follow them."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """How much is kept."""
        return sum(map(len, self._events))

    def add(self, events: bytes) -> None:
        """Append events, one or several in a piece."""
        self._events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._wake()

    def close(self) -> None:
        """Say that no more will come."""
        self._is_closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from number `start` on, as they come, to the last one."""
        while True:
            changed = self._changed
            if new := self._events[start:]:
                start += len(new)
                yield b"".join(new)
            elif self._is_closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class StoredResponse:
    """A response, and the conversation that it ends."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None
    """What still works at it, for responses in the background."""
    log: EventLog | None = None
    """Its events, if it was asked for in the background and as a stream."""

    @property
    def is_running(self) -> bool:
        """Whether it is still worked at."""
        return self.task is not None and not self.task.done()

    @property
    def num_characters(self) -> int:
        """How much text it holds, roughly."""
        logged = self.log.num_bytes if self.log is not None else 0
        return 1000 + logged + sum(len(str(message.get("content"))) for message in self.messages)


class ResponseStore:
    """At most `size` responses by id; the oldest make room. An id tells the front whose store has it."""

    def __init__(self, size: int, max_characters: int = MAX_CHARACTERS, *, front: int = 0) -> None:
        self._size, self._max_characters, self._front = size, max_characters, front
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def new_id(self) -> str:
        """The id of a response that may come to be kept here."""
        return f"resp_{uuid.uuid4().hex}" + (f"_{self._front:x}" if self._front else "")

    def put(self, response: StoredResponse) -> None:
        """Keep a response. Raises `RequestError` (429) for one in the background when too many are worked at."""
        if response.task is None and response.body["background"] and self.num_running >= self._size:
            raise RequestError("Too many responses run in the background. Try again later.", code=429)
        self._responses[response.body["id"]] = response
        total = sum(kept.num_characters for kept in self._responses.values())
        for response_id, old in list(self._responses.items()):
            if len(self._responses) <= self._size and total <= self._max_characters:
                break
            if not old.is_running and old is not response:
                total -= old.num_characters
                del self._responses[response_id]

    def get(self, response_id: str) -> StoredResponse:
        """A kept response. Raises `RequestError` (404) for one that is not, or no longer, here."""
        if response_id not in self._responses:
            raise not_found(response_id)
        return self._responses[response_id]

    def follow(self, response_id: str, start: int) -> AsyncGenerator[bytes, None]:
        """The events of a response from number `start` on. Raises `RequestError` for one that has none."""
        log = self.get(response_id).log
        if log is None:
            raise RequestError(
                "Only a response that was asked for with background and stream can be streamed.", "stream"
            )
        return log.follow(start)

    async def cancel(self, response_id: str) -> dict[str, Any]:
        """End a response in the background; it as it is then. Raises `RequestError` for any other."""
        stored = self.get(response_id)
        if not stored.body["background"]:
            raise RequestError("Only responses in the background can be cancelled.", "response_id")
        if stored.task is not None and not stored.task.done():
            stored.task.cancel()
            await asyncio.gather(stored.task, return_exceptions=True)
        return stored.body

    @property
    def num_running(self) -> int:
        """Responses that are still worked at."""
        return sum(kept.is_running for kept in self._responses.values())


def owner_of(response_id: str) -> int:
    """The front in whose store a response must be."""
    match = OWNED_ID.fullmatch(response_id)
    return int(match[1], 16) if match else 0


def not_found(response_id: str) -> RequestError:
    """The error for a response that is not, or no longer, kept."""
    return RequestError(f"Response with id {response_id[:128]!r} not found.", "response_id", 404)
