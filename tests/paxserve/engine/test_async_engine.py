import asyncio

import pytest

from paxserve.engine.output_processor import OutputKind
from paxserve.errors import EngineDeadError, RequestError
from paxserve.sampling_params import SamplingParams
from tests.paxserve.fake_core import CRASH, REFUSE, SCRIPT
from tests.paxserve.serving import Serving, run


async def collect(served: Serving, text: str = "Hello", kind=OutputKind.DELTA, request_id: str = "a", **params):
    outputs = []
    async for output in served.engine.generate(text, SamplingParams(**params), request_id, kind=kind):
        outputs.append(output)
    return outputs


def test_deltas_join_to_what_the_final_output_says():
    async def test(served: Serving):
        deltas = await collect(served, max_tokens=12)
        growing = await collect(served, kind=OutputKind.CUMULATIVE, max_tokens=12)
        final = await collect(served, kind=OutputKind.FINAL_ONLY, max_tokens=12)
        return deltas, growing, final

    deltas, growing, final = run(test)
    assert len(final) == 1
    (output,) = final[0].outputs
    assert output.text == SCRIPT[:12]
    assert "".join(delta.outputs[0].text for delta in deltas) == output.text
    assert growing[-1].outputs[0] == output
    texts = [step.outputs[0].text for step in growing]
    assert texts == sorted(texts, key=len)
    assert final[0].finished


def test_leaving_the_loop_aborts_the_request():
    async def test(served: Serving):
        served.core.step_seconds = 0.001
        async for _ in served.engine.generate("Hello", SamplingParams(max_tokens=400), "a"):
            break
        await asyncio.sleep(0.05)
        return served.core.choices, served.engine.num_unfinished, served.client.aborted

    running, unfinished, aborted = run(test)
    assert not running
    assert unfinished == 0
    assert aborted == [("a", None)]


def test_cancelling_the_reader_aborts_the_request():
    async def test(served: Serving):
        served.core.step_seconds = 0.001
        reader = asyncio.ensure_future(collect(served, kind=OutputKind.FINAL_ONLY, max_tokens=400))
        while not served.core.choices:
            await asyncio.sleep(0.001)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        return served.core.choices, served.engine.num_unfinished

    assert run(test) == ({}, 0)


def test_a_reader_that_waits_gets_one_merged_delta():
    async def test(served: Serving):
        engine = served.engine
        params = SamplingParams(max_tokens=30, n=2, temperature=1, logprobs=1)
        request = await engine.prepare("a", "Hello", params)
        stream = engine.submit([request], OutputKind.DELTA)
        while engine.num_unfinished:
            await asyncio.sleep(0.001)
        return [output async for batch in stream for _, output in batch]

    (output,) = run(test)
    assert output.finished
    assert {choice.index: choice.text for choice in output.outputs} == dict.fromkeys(range(2), SCRIPT[:23] + SCRIPT[:3])
    for choice in output.outputs:
        assert len(choice.token_ids) == len(choice.logprobs) == 30
        assert choice.finish_reason == "length"


def test_a_stop_string_found_in_the_text_ends_the_request_in_the_core():
    async def test(served: Serving):
        await collect(served, stop=["two"], max_tokens=400)
        await asyncio.sleep(0.01)
        return served.core.choices, served.client.aborted

    assert run(test) == ({}, [("a", None)])


def test_refused_by_the_front_or_by_the_core():
    async def test(served: Serving):
        for text in ("", "x " * 600, REFUSE):
            with pytest.raises(RequestError):
                await collect(served, text)
        return served.engine.num_unfinished, served.engine.output_processor.num_unfinished

    assert run(test) == (0, 0)


def test_one_name_cannot_be_used_twice_at_once():
    async def test(served: Serving):
        served.core.step_seconds = 0.001
        first = asyncio.ensure_future(collect(served, max_tokens=20, kind=OutputKind.FINAL_ONLY))
        while not served.core.choices:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="in use"):
            await collect(served)
        return (await first)[0].outputs[0].text

    assert run(test) == SCRIPT[:19]


def test_death_reaches_every_reader_and_every_later_request():
    async def test(served: Serving):
        served.core.step_seconds = 0.001
        deaths = []
        served.engine.on_death = deaths.append
        readers = [asyncio.ensure_future(collect(served, request_id=name, max_tokens=400)) for name in "abc"]
        await asyncio.sleep(0.02)
        readers.append(asyncio.ensure_future(collect(served, CRASH, request_id="d")))
        results = await asyncio.gather(*readers, return_exceptions=True)
        with pytest.raises(EngineDeadError):
            await collect(served)
        with pytest.raises(EngineDeadError):
            await served.engine.call("stats")
        return results, deaths

    results, deaths = run(test)
    assert len(results) == 4
    assert all(isinstance(result, EngineDeadError) and "on fire" in str(result) for result in results)
    assert len(deaths) == 1


def test_a_silent_death_is_noticed_by_the_exit_status():
    async def test(served: Serving):
        served.core.step_seconds = 0.001
        reader = asyncio.ensure_future(collect(served, max_tokens=400))
        await asyncio.sleep(0.02)
        assert served.client.exited is not None
        served.client.exited.set_result(-9)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await reader

    run(test)


def test_calls_are_passed_on():
    async def test(served: Serving):
        return await served.engine.call("reset_prefix_cache"), served.core.resets

    assert run(test) == (True, 1)


def test_long_texts_are_tokenized_beside_the_event_loop():
    async def test(served: Serving):
        ticks = []

        async def tick():
            while True:
                ticks.append(None)
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        request = await served.engine.prepare("a", "the dog " * 20_000, SamplingParams(truncate_prompt_tokens=5))
        ticking.cancel()
        return len(request.prompt_token_ids), len(ticks)

    length, ticks = run(test)
    assert length == 5
    assert ticks > 1  # a call that held up the loop would leave it none


def test_a_request_that_cannot_be_sent_leaves_nothing_behind():
    async def test(served: Serving):
        requests = await served.engine.prepare_all("a", ["Hello", "there"], SamplingParams(max_tokens=400))
        requests[1].cache_salt = "\ud800"
        with pytest.raises(UnicodeEncodeError):
            served.engine.submit(requests, OutputKind.DELTA)
        return served.engine.num_unfinished, served.engine.output_processor.num_unfinished, served.core.choices

    assert run(test) == (0, 0, {})
