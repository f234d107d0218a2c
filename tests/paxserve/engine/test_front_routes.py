import asyncio
import time
from dataclasses import dataclass, field

import pytest

from paxserve.config import EngineConfig, ModelConfig
from paxserve.engine import wire
from paxserve.engine.core_client import CoreClient
from paxserve.engine.core_link import CoreLink
from paxserve.engine.front_routes import STATS_SECONDS, FrontRoutes
from paxserve.messages import DecodedTokens, EngineOutput, EngineRequest, EngineStats, StepOutputs
from paxserve.sampling_params import SamplingParams
from tests.paxserve.fake_core import REFUSE
from tests.small_tokenizers import byte_level_tokenizer

FAKE = "tests.paxserve.fake_core:FakeCore"


def request(name: str, text: str = "Hello", **params) -> EngineRequest:
    ids = byte_level_tokenizer().encode(text)
    return EngineRequest(
        request_id=name, prompt_token_ids=ids, params=SamplingParams(**params), arrival_time=time.time()
    )


@dataclass
class Socket:
    """One that keeps what is sent."""

    sent: list[wire.FromCore] = field(default_factory=list)
    is_closed: bool = False

    def send(self, payload: bytes) -> None:
        self.sent.append(wire.decode_from_core(payload))

    def close(self, linger: int = 1) -> None:
        self.is_closed = True


class Routed:
    """Routes with fronts 1 and 2 behind sockets that keep what is sent."""

    def __init__(self) -> None:
        self.sockets = [Socket() for _ in range(4)]
        self.routes = FrontRoutes(self.sockets[0], self.sockets.__getitem__)  # type: ignore[arg-type]
        self.routes.join(1)
        self.routes.join(2)

    def tokens(self, front: int) -> list[tuple[str, int, list[int]]]:
        steps = [message for message in self.sockets[front].sent if isinstance(message, wire.Outputs)]
        outputs = [output for step in steps for output in (*step.outputs, *(step.decoded or ()))]
        return [(output.request_id, output.index, output.new_token_ids) for output in outputs]


def output(name: str, index: int = 0, token: int = 5, reason: str | None = None) -> EngineOutput:
    return EngineOutput(request_id=name, index=index, new_token_ids=[token], finish_reason=reason)


def test_with_one_front_everything_goes_there_as_it_is():
    socket = Socket()
    routes = FrontRoutes(socket, lambda front: pytest.fail("nobody joined"))  # type: ignore[arg-type]
    assert routes.own(request("a"), 0)
    step = StepOutputs([output("a")], DecodedTokens(["b"], [0], [[1]]))
    routes.send_step(step, EngineStats(num_steps=3))
    assert socket.sent == [wire.Outputs.of(step, EngineStats(num_steps=3))]
    routes.check_integrity(is_idle=True)


def test_outputs_go_to_the_front_that_asked():
    routed = Routed()
    routes = routed.routes
    assert routes.own(request("a", n=2), 1)
    assert routes.own(request("b"), 2)
    decoded = DecodedTokens(["b", "a", "unknown", "a"], [0, 0, 0, 1], [[1], [2], [3], [4, 5]])
    routes.send_step(StepOutputs([output("b", token=9)], decoded), EngineStats())
    assert routed.tokens(1) == [("a", 0, [2]), ("a", 1, [4, 5])]
    assert routed.tokens(2) == [("b", 0, [9]), ("b", 0, [1])]
    assert routed.tokens(0) == []


def test_a_request_is_forgotten_when_its_last_choice_has_ended():
    routed = Routed()
    routes = routed.routes
    routes.own(request("a", n=2), 1)
    routes.own(request("b"), 1)
    routes.send_step([output("a", 0, reason="stop")], EngineStats())
    routes.send_step([output("a", 0, token=6), output("a", 1, token=7, reason="length")], EngineStats())
    routes.disown([("b", None), ("unknown", None), ("unknown", 3)])
    routes.check_integrity(is_idle=True)
    routes.send_step([output("a", 1), output("b")], EngineStats())
    assert len(routed.tokens(1)) == 3


def test_choices_that_are_aborted_count_as_ended():
    routes = Routed().routes
    routes.own(request("a", n=3), 2)
    routes.disown([("a", 1), ("a", 1)])
    routes.send_step([output("a", 1, reason="stop"), output("a", 0, reason="stop")], EngineStats())
    with pytest.raises(AssertionError):
        routes.check_integrity(is_idle=True)
    routes.disown([("a", 2)])
    routes.check_integrity(is_idle=True)


def test_a_front_that_leaves_is_sent_nothing_and_asks_nothing_any_more():
    routed = Routed()
    routes = routed.routes
    routes.own(request("a"), 1)
    routes.own(request("b"), 2)
    routes.own(request("c"), 1)
    assert sorted(routes.leave(1)) == ["a", "c"]
    assert routed.sockets[1].is_closed
    assert not routes.own(request("late"), 1)
    routes.send(wire.Reply(call_id=1), 1)
    routes.send_step([output("a"), output("b", reason="stop")], EngineStats())
    assert not routed.sockets[1].sent
    assert routed.tokens(2) == [("b", 0, [5])]
    assert routes.leave(1) == []
    routes.check_integrity(is_idle=True)


def test_the_state_reaches_fronts_without_requests_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    routed = Routed()
    routed.routes.own(request("a"), 1)
    for _ in range(10):
        routed.routes.send_step([output("a")], EngineStats())
        now[0] += STATS_SECONDS / 4
    assert len(routed.sockets[1].sent) == 10
    assert len(routed.sockets[2].sent) == 3
    assert len(routed.sockets[0].sent) == 3


async def until(link: CoreLink, found):
    """The first message that `found` likes."""
    while not found(message := await link.receive()):
        pass
    return message


async def read(link: CoreLink, name: str) -> list[int]:
    """All tokens of one request."""
    tokens, reason = [], None
    while reason is None:
        message = await link.receive()
        for output in message.outputs if isinstance(message, wire.Outputs) else ():
            assert output.request_id == name
            tokens += output.new_token_ids
            reason = output.finish_reason
    return tokens


def test_two_fronts_of_one_core_and_one_vanishes():
    config = EngineConfig(model=ModelConfig(model="fake", override_generation_config={"temperature": 0.5}))
    launcher = CoreClient.launch(config, FAKE)

    async def check(link: CoreLink):
        call = asyncio.ensure_future(link.call("check_integrity"))
        await asyncio.sleep(0)
        link.resolve_call(await until(link, lambda message: isinstance(message, wire.Reply)))
        return await call

    async def main():
        first, second = CoreLink(launcher.folder, 1), CoreLink(launcher.folder, 2)
        for link in (first, second):
            link.send(wire.Join(link.front))  # while the core still loads
        info = await launcher.ready()
        assert await first.ready() == await second.ready() == info
        first.add_request(request("a", max_tokens=3))
        second.add_request(request("b", max_tokens=5))
        counts = len(await read(first, "a")), len(await read(second, "b"))
        first.add_request(request("never", REFUSE))
        refused = await until(first, lambda message: isinstance(message, wire.Refused))
        first.add_request(request("long", max_tokens=10_000))
        await until(first, lambda message: isinstance(message, wire.Outputs) and message.outputs)
        first.close_sockets()
        launcher.send(wire.Leave(1))
        await until(second, lambda message: isinstance(message, wire.Outputs) and message.stats.num_running == 0)
        await check(second)
        second.close_sockets()
        return counts, refused.request_id

    try:
        assert asyncio.run(asyncio.wait_for(main(), 30)) == ((3, 5), "never")
    finally:
        launcher.close()
