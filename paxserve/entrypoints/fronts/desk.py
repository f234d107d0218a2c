"""What a front does with what it alone holds, whichever front was asked for it: requests in flight, kept responses."""

from collections.abc import Callable
from typing import Any

import msgspec

from paxserve.engine.async_engine import AsyncEngine
from paxserve.entrypoints.response_store import ResponseStore


class Quiet(msgspec.Struct, tag=True):
    """End the requests in flight, or wait for them."""

    is_end: bool


class EndAnswers(msgspec.Struct, tag=True):
    """End answers by their ids, or all of them; how many requests that were."""

    answer_ids: list[str] | None


class SaveMetrics(msgspec.Struct, tag=True):
    """Put what was counted where the other fronts find it."""


class GetResponse(msgspec.Struct, tag=True):
    """A kept response as far as it has come."""

    response_id: str


class FollowResponse(msgspec.Struct, tag=True):
    """The events of a response in the background from number `start` on, as they come."""

    response_id: str
    start: int


class CancelResponse(msgspec.Struct, tag=True):
    """End a response in the background; what has become of it."""

    response_id: str


class GetConversation(msgspec.Struct, tag=True):
    """What was said up to the end of a kept response."""

    response_id: str


Order = Quiet | EndAnswers | SaveMetrics | GetResponse | FollowResponse | CancelResponse | GetConversation


class Desk:
    """Carries out orders at this front."""

    def __init__(self, engine: AsyncEngine, responses: ResponseStore) -> None:
        self._engine, self._responses = engine, responses
        self.save_metrics: Callable[[], None] = lambda: None

    async def do(self, order: Order) -> Any:
        """What the order asks for, plain data; for `FollowResponse` an iterator of bytes. Raises `RequestError`."""
        match order:
            case Quiet(is_end):
                await self._engine.quiet(is_end)
            case EndAnswers(answer_ids):
                return self._engine.end(answer_ids)
            case SaveMetrics():
                self.save_metrics()
            case GetResponse(response_id):
                return self._responses.get(response_id).body
            case FollowResponse(response_id, start):
                return self._responses.follow(response_id, start)
            case CancelResponse(response_id):
                return await self._responses.cancel(response_id)
            case GetConversation(response_id):
                return self._responses.get(response_id).messages
