"""All front processes of a server, as one of them sees them."""

from typing import Any, Protocol

from paxserve.engine.async_engine import AsyncEngine
from paxserve.entrypoints.fronts.desk import Desk, EndAnswers, Order, Quiet


class FrontGoneError(Exception):
    """There is no front with this number, or it has just ended."""


class Fronts(Protocol):
    """Has orders carried out where they belong."""

    async def ask(self, front: int, order: Order) -> Any:
        """What the front with this number answers. Raises `FrontGoneError`, and what the front raises."""
        ...

    async def ask_all(self, order: Order) -> dict[int, Any]:
        """What each front answers, by its number; those that end meanwhile are left out."""
        ...

    async def render_metrics(self) -> bytes:
        """The text that Prometheus scrapes, for the whole server."""
        ...

    async def close(self) -> None:
        """Answer the others no more."""
        ...


class OneFront:
    """The only front of its server."""

    def __init__(self, engine: AsyncEngine, desk: Desk) -> None:
        self._engine, self._desk = engine, desk

    async def ask(self, front: int, order: Order) -> Any:
        """What this front answers."""
        if front:
            raise FrontGoneError(front)
        return await self._desk.do(order)

    async def ask_all(self, order: Order) -> dict[int, Any]:
        """The same."""
        return {0: await self._desk.do(order)}

    async def render_metrics(self) -> bytes:
        """Its own metrics."""
        return self._engine.metrics.render()

    async def close(self) -> None:
        """There is nobody to answer."""


async def quiet(fronts: Fronts, is_end: bool) -> None:
    """End the requests in flight at every front, or wait for them."""
    await fronts.ask_all(Quiet(is_end))


async def end_answers(fronts: Fronts, answer_ids: list[str] | None) -> int:
    """End answers by their ids, or all of them; how many requests that were."""
    return sum((await fronts.ask_all(EndAnswers(answer_ids))).values())
