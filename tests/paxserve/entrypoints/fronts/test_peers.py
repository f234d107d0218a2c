import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from paxserve.entrypoints.fronts.all_fronts import FrontGoneError
from paxserve.entrypoints.fronts.desk import (
    CancelResponse,
    EndAnswers,
    FollowResponse,
    GetConversation,
    GetResponse,
    Order,
    Quiet,
)
from paxserve.entrypoints.fronts.peers import Peers
from paxserve.errors import EngineDeadError, RequestError


class Desk:
    """Answers as it is told, and notes what it was asked."""

    def __init__(self, front: int) -> None:
        self.front, self.asked = front, []
        self.answer: Any = {"front": front}
        self.is_followed = False

    async def do(self, order: Order) -> Any:
        self.asked.append(order)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.follow() if isinstance(order, FollowResponse) else self.answer

    async def follow(self) -> AsyncGenerator[bytes, None]:
        self.is_followed = True
        try:
            yield b"one"
            yield b"two"
            await asyncio.sleep(0 if self.answer == "short" else 60)
        finally:
            self.is_followed = False


def run(folder: Path, test) -> Any:
    """The result of a test with fronts 3 and 4, and their desks."""

    async def main():
        desks = {front: Desk(front) for front in (3, 4)}
        peers = {front: Peers(front, folder, None, desk, None) for front, desk in desks.items()}  # type: ignore[arg-type]
        for peer in peers.values():
            await peer.open()
        try:
            return await asyncio.wait_for(test(peers, desks), 10)
        finally:
            for peer in peers.values():
                await peer.close()

    return asyncio.run(main())


def test_orders_go_to_the_front_that_is_meant(tmp_path):
    orders = [
        GetResponse("a"),
        CancelResponse("b"),
        GetConversation("c"),
        EndAnswers(["x"]),
        EndAnswers(None),
        Quiet(True),
    ]

    async def test(peers, desks):
        desks[4].answer = {"huge": 10**30, "text": "é\u2028", "none": None, "list": [1.5, True]}
        answers = [await peers[3].ask(4, order) for order in orders]
        own = await peers[3].ask(3, orders[0])
        return answers, own, desks[4].asked, desks[3].asked, await peers[3].ask_all(Quiet(False))

    answers, own, asked, own_asked, all_told = run(tmp_path, test)
    assert answers == [{"huge": 10**30, "text": "é\u2028", "none": None, "list": [1.5, True]}] * 6
    assert own == {"front": 3}
    assert asked[:6] == orders
    assert own_asked[0] == orders[0]
    assert set(all_told) == {3, 4}


def test_errors_come_back_as_what_they_are(tmp_path):
    async def test(peers, desks):
        desks[4].answer = RequestError("Not here.", "response_id", 404)
        with pytest.raises(RequestError, match="Not here") as refused:
            await peers[3].ask(4, GetResponse("a"))
        desks[4].answer = EngineDeadError("The engine core died.")
        with pytest.raises(EngineDeadError, match="core died"):
            await peers[3].ask_all(Quiet(True))
        with pytest.raises(FrontGoneError):
            await peers[3].ask(7, GetResponse("a"))
        return refused.value.param, refused.value.code

    assert run(tmp_path, test) == ("response_id", 404)


def test_parts_come_as_they_are_made_and_the_maker_hears_when_nobody_listens(tmp_path):
    async def test(peers, desks):
        desks[4].answer = "short"
        whole = [piece async for piece in await peers[3].ask(4, FollowResponse("a", 0))]
        desks[4].answer = "long"
        pieces = await peers[3].ask(4, FollowResponse("a", 0))
        first = await anext(pieces)
        was_followed = desks[4].is_followed
        await pieces.aclose()
        while desks[4].is_followed:
            await asyncio.sleep(0.01)
        return whole, first, was_followed

    assert run(tmp_path, test) == ([b"one", b"two"], b"one", True)


def test_a_front_that_ends_in_the_middle_is_an_error(tmp_path):
    async def test(peers, desks):
        pieces = await peers[3].ask(4, FollowResponse("a", 0))
        await anext(pieces)
        await peers[4].close()
        with pytest.raises(EngineDeadError, match="has ended"):
            async for _ in pieces:
                pass
        assert await peers[3].ask_all(Quiet(True)) == {3: {"front": 3}}

    run(tmp_path, test)
