import asyncio
import os
import time

import pytest

from paxserve.config import EngineConfig, ModelConfig
from paxserve.engine import wire
from paxserve.engine.core_client import CoreClient
from paxserve.errors import ConfigError, EngineDeadError
from paxserve.messages import EngineRequest, EngineStats
from paxserve.sampling_params import SamplingParams
from tests.paxserve.fake_core import CRASH, REFUSE, VANISH, FakeCore
from tests.small_tokenizers import byte_level_tokenizer

FAKE = "tests.paxserve.fake_core:FakeCore"


def config(model: str = "fake") -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=model, override_generation_config={"temperature": 0.5}))


def request(name: str, text: str = "Hello", **params) -> EngineRequest:
    ids = byte_level_tokenizer().encode(text)
    return EngineRequest(
        request_id=name, prompt_token_ids=ids, params=SamplingParams(**params), arrival_time=time.time()
    )


def run(test, model: str = "fake", core: str = FAKE):
    """The result of `test(client)`; the process must be gone afterwards, and its folder too."""
    client = CoreClient.launch(config(model), core)

    async def main():
        return await asyncio.wait_for(test(client), 30)

    try:
        return asyncio.run(main())
    finally:
        client.close()
        assert client.process.poll() is not None
        assert not client.folder.exists()


def test_tokens_come_back_and_calls_are_answered():
    async def test(client: CoreClient):
        info = await client.ready()
        client.add_request(request("a", max_tokens=3, n=2, logit_bias={5: 1.0}, seed=-(2**63)))
        tokens: dict[int, list[int]] = {0: [], 1: []}
        finished = 0
        while finished < 2:
            message = await client.receive()
            assert isinstance(message, wire.Outputs)
            for output in message.outputs:
                assert output.request_id == "a"
                tokens[output.index] += output.new_token_ids
                finished += output.finish_reason == "length"
        idle = await client.receive()
        stats = asyncio.ensure_future(client.call("stats"))
        reset = asyncio.ensure_future(client.call("reset_prefix_cache"))
        odd = asyncio.ensure_future(client.call("step"))
        while not (stats.done() and reset.done() and odd.done()):
            message = await client.receive()
            if isinstance(message, wire.Reply):
                client.resolve_call(message)
            await asyncio.sleep(0)
        assert isinstance(odd.exception(), EngineDeadError)
        return info, tokens, idle, stats.result(), reset.result()

    info, tokens, idle, stats, reset = run(test)
    core = FakeCore(config())
    assert info == core.model_info
    assert tokens == {0: core.script[:3], 1: core.script[:3]}
    assert idle.outputs == []
    assert idle.stats.num_running == 0
    assert isinstance(stats, EngineStats)
    assert stats.generation_tokens == 6
    assert reset is True


def test_aborts_and_refusals():
    async def test(client: CoreClient):
        await client.ready()
        client.add_request(request("long", max_tokens=500))
        client.add_request(request("never", REFUSE))
        refusals = []
        while not refusals:
            message = await client.receive()
            refusals += [message] if isinstance(message, wire.Refused) else []
        client.abort_requests([("long", None)])
        while not (isinstance(message := await client.receive(), wire.Outputs) and message.stats.num_running == 0):
            pass
        return refusals[0]

    refusal = run(test)
    assert (refusal.request_id, refusal.message, refusal.param, refusal.code) == (
        "never", "This prompt can never run.", "input_tokens", 400,
    )  # fmt: skip


def test_a_start_that_the_user_can_mend_says_how():
    with pytest.raises(ConfigError, match="The checkpoint is broken: expected a model, got nothing"):
        run(lambda client: client.ready(), "broken")


def test_a_start_that_is_a_bug_says_so():
    with pytest.raises(EngineDeadError, match="ZeroDivisionError: a bug in the engine"):
        run(lambda client: client.ready(), "buggy")


def test_a_core_that_vanishes_while_it_starts():
    async def test(client: CoreClient):
        client.process.kill()
        await client.ready()

    with pytest.raises(EngineDeadError, match="was killed by signal 9"):
        run(test)


@pytest.mark.parametrize(("text", "status"), [(VANISH, 3), (CRASH, 1)])
def test_a_core_that_ends_is_noticed(text, status):
    async def test(client: CoreClient):
        await client.ready()
        client.add_request(request("a", text))
        return await client.wait_exit()

    assert run(test) == status


def test_the_core_ends_when_its_parent_is_gone():
    async def test(client: CoreClient):
        await client.ready()
        assert client.process.stdin is not None
        client.process.stdin.close()  # what the system does to a process that is killed
        return await client.wait_exit()

    assert run(test) == 1


def test_the_sockets_are_private():
    async def test(client: CoreClient):
        await client.ready()
        return os.stat(client.folder).st_mode & 0o777, sorted(path.name for path in client.folder.iterdir())

    assert run(test) == (0o700, ["outputs", "requests"])


def test_signals_to_the_whole_group_leave_the_core_running():
    async def test(client: CoreClient):
        await client.ready()
        client.process.terminate()
        client.add_request(request("a", max_tokens=1))
        while not (isinstance(message := await client.receive(), wire.Outputs) and message.outputs):
            pass
        return message.outputs[0].finish_reason

    assert run(test) == "length"
