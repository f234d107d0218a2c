"""Responses that are kept to be retrieved, continued or cancelled: the newest few, in memory."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from paxserve.errors import RequestError


@dataclass
class StoredResponse:
    """A response, and the conversation that it ends."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None
    """What still works at it, for responses in the background."""


class ResponseStore:
    """At most `size` responses by id; the oldest make room."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response: StoredResponse) -> None:
        """Keep a response; one that still runs stays until it has ended."""
        self._responses[response.body["id"]] = response
        for response_id, old in list(self._responses.items()):
            if len(self._responses) <= self._size:
                break
            if old.task is None or old.task.done():
                del self._responses[response_id]

    def get(self, response_id: str) -> StoredResponse:
        """A kept response. Raises `RequestError` (404) for one that is not, or no longer, here."""
        if response_id not in self._responses:
            raise RequestError(f"Response with id {response_id[:128]!r} not found.", "response_id", 404)
        return self._responses[response_id]

    @property
    def num_running(self) -> int:
        """Responses that are still worked at."""
        return sum(entry.task is not None and not entry.task.done() for entry in self._responses.values())
