"""Faults that other engines were reported to have, tried on a real engine behind the server, in this process.

docs/known-faults.md has the whole list, with the tests elsewhere that show the rest.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import paxserve
from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from paxserve.loaders.checkpoint import open_tokenizer
from tests.paxserve.entrypoints.test_app import value_of
from tests.paxserve.serving import Serving, serving_core
from tests.small_tokenizers import CHATML, CORPUS

ROOT = Path(paxserve.__file__).parent.parent
TOKENIZER_SIZE = 300
"""Less than the model's 320: its last ids are padding."""
FLAGS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, "compile_sizes": [32],
         "num_gpu_blocks_override": 40}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A tiny Llama with a tokenizer: configuration, core, tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    for name in ("config.json", "model.safetensors"):
        (path / name).symlink_to(ROOT / "tests/goldens/llama" / name)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    settings = EngineConfig.from_flags(model=str(path), **FLAGS)
    return settings, EngineCore(settings), open_tokenizer(settings.model)


@pytest.fixture
def attack(engine):
    """Runs a test on a server of the engine; afterwards no page is held and the invariants stand."""
    config, core, tokenizer = engine

    def go(test, **server):
        async def main():
            async with serving_core(config, core, tokenizer, **server) as served:
                return await asyncio.wait_for(test(served), 60)

        assert core.reset_prefix_cache()
        answer = asyncio.run(main())
        core.check_integrity()
        assert core.stats().num_pages_in_use == 0
        return answer

    return go


async def ask(served: Serving, prompt: Any, **body: Any) -> dict[str, Any]:
    response = await served.complete(prompt, **{"temperature": 0, "ignore_eos": True, "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def tokens(served: Serving, prompt: Any, **body: Any) -> list[int]:
    return (await ask(served, prompt, return_token_ids=True, **body))["choices"][0]["token_ids"]


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


PROMPT = [7, 90, 41, 200, 12, 12, 250, 33]


def test_a_barred_token_comes_as_soon_as_it_may(attack):
    async def test(served: Serving):
        body = {"min_tokens": 6, "stop_token_ids": [77], "logit_bias": {"77": 100}, "max_tokens": 20}
        return (await ask(served, PROMPT, return_token_ids=True, **body))["choices"][0]

    choice = attack(test)
    assert 77 not in choice["token_ids"][:6]
    assert choice["token_ids"][6:] == [77]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 77)


def test_every_end_token_of_the_generation_config_ends(attack):
    async def test(served: Serving):
        return [
            (await ask(served, PROMPT, ignore_eos=False, logit_bias={end: 100}))["choices"][0] for end in ("1", "3")
        ]

    for choice in attack(test):
        assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", None, "")


def test_a_stop_string_in_a_chat_is_never_shown(attack):
    async def test(served: Serving):
        body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
        whole = (await served.chat(**body)).json()["choices"][0]["message"]["content"]
        stop = whole[len(whole) // 2 :][:3]  # begins and ends within tokens, as may be
        plain = (await served.chat(**body, stop=[stop])).json()["choices"][0]
        streamed = events((await served.chat(**body, stop=[stop], stream=True)).text)
        return whole, stop, plain, "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed)

    whole, stop, plain, streamed = attack(test)
    assert len(stop) == 3
    assert plain["message"]["content"] == streamed == whole[: whole.index(stop)]
    assert plain["finish_reason"] == "stop"


def test_scores_do_not_depend_on_order_or_on_what_is_cached(attack):
    prompts = [[(7 * place) % 290 + 5 for place in range(40)] + [last] for last in (9, 10, 11)]

    async def test(served: Serving):
        async def score(prompt):
            body = {"echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
            return (await served.complete(prompt, **body)).json()["choices"][0]["logprobs"]["token_logprobs"]

        first = [await score(prompt) for prompt in prompts]
        await ask(served, prompts[1])
        backwards = [await score(prompt) for prompt in reversed(prompts)][::-1]
        together = await asyncio.gather(*(score(prompt) for prompt in prompts))
        return first, backwards, together

    first, backwards, together = attack(test)
    for other in (backwards, together):
        for one, two in zip(first, other, strict=True):
            assert len(one) == 42
            assert one[0] is two[0] is None
            assert one[1:] == pytest.approx(two[1:], abs=1e-4)


def test_a_seeded_request_is_the_same_in_any_company(attack):
    async def test(served: Serving):
        seeded = {"temperature": 1.5, "seed": 11, "max_tokens": 16}
        alone = await tokens(served, PROMPT, **seeded)
        crowd = [tokens(served, [5 + place] * 9, temperature=1.0, max_tokens=16) for place in range(3)]
        return alone, (await asyncio.gather(*crowd[:2], tokens(served, PROMPT, **seeded), crowd[2]))[2]

    alone, among = attack(test)
    assert alone == among


def test_without_a_seed_answers_differ_and_vary(attack):
    async def test(served: Serving):
        return await asyncio.gather(*(tokens(served, PROMPT, temperature=2, max_tokens=12) for _ in range(6)))

    answers = attack(test)
    assert len({tuple(answer) for answer in answers}) == 6
    assert all(len(set(answer)) > 3 for answer in answers)


def test_only_the_repetition_penalty_sees_the_prompt(attack):
    seen, other = 50, 60

    async def test(served: Serving):
        only = {"allowed_token_ids": [seen, other], "max_tokens": 2}
        prompt = [seen, 7, seen, 9]
        first, second = [
            (await ask(served, prompt, logprobs=0, allowed_token_ids=[token], max_tokens=1))["choices"][0]["logprobs"]
            for token in (seen, other)
        ]
        lead = first["token_logprobs"][0] - second["token_logprobs"][0]
        only["logit_bias"] = {str(other): lead - 1}  # now `seen` leads by one
        return [
            await tokens(served, prompt, **only, **penalty)
            for penalty in ({}, {"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 100})
        ]

    plain, presence, frequency, repetition = attack(test)
    assert plain[0] == presence[0] == frequency[0] == seen
    assert repetition[0] != seen


def test_a_bias_acts_at_every_step(attack):
    async def test(served: Serving):
        favoured = await tokens(served, PROMPT, logit_bias={"123": 100})
        usual = await tokens(served, PROMPT)
        return favoured, usual, await tokens(served, PROMPT, logit_bias={str(usual[0]): -100})

    favoured, usual, without = attack(test)
    assert favoured == [123] * 8
    assert usual[0] not in without


def test_what_is_allowed_and_barred_at_once(attack):
    async def test(served: Serving):
        a, b = [(await served.post("/tokenize", prompt=text)).json()["tokens"] for text in "ab"]
        only = {"allowed_token_ids": [*a, *b], "n": 2, "temperature": 1, "return_token_ids": True}
        one = await ask(served, PROMPT, **only, bad_words=["a"])
        both = await served.complete(PROMPT, **only, bad_words=["a", "b"], max_tokens=6, ignore_eos=True)
        return a, b, one, both

    a, b, one, both = attack(test)
    assert all(choice["token_ids"] == b * 8 for choice in one["choices"])
    assert all(set(choice["token_ids"]) <= {*a, *b} for choice in both.json()["choices"])


def test_odd_ids_never_break_a_stream(attack):
    async def test(served: Serving):
        body = {"temperature": 2, "max_tokens": 100, "skip_special_tokens": False, "ignore_eos": True, "stream": True}
        streams = await asyncio.gather(*(served.complete(PROMPT, seed=seed, **body) for seed in range(8)))
        padding = await ask(served, PROMPT, logit_bias={"310": 100}, return_token_ids=True)
        return [events(response.text) for response in streams], padding

    streams, padding = attack(test)
    assert all(stream[-1]["choices"][0]["finish_reason"] == "length" for stream in streams)
    assert padding["choices"][0]["token_ids"] == [310] * 8  # an id that no text belongs to
    assert padding["choices"][0]["text"] == ""


@pytest.mark.parametrize("interval", [1, 3])
def test_chunks_of_several_tokens_have_the_alternatives_of_each(attack, interval):
    async def test(served: Serving):
        body = {"temperature": 1, "seed": 3, "logprobs": 3, "max_tokens": 13}
        plain = (await ask(served, PROMPT, **body))["choices"][0]
        body |= {"stream": True, "stream_interval": interval, "ignore_eos": True}
        return plain, [event["choices"][0] for event in events((await served.complete(PROMPT, **body)).text)]

    plain, chunks = attack(test)
    assert "".join(chunk["text"] for chunk in chunks) == plain["text"]
    whole, told = plain["logprobs"], [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    for field in ("tokens", "text_offset"):
        assert sum((part[field] for part in told), []) == whole[field]
    # The second asking finds a part of the prompt in the cache, so that the last digits differ.
    tops = sum((part["top_logprobs"] for part in told), [])
    assert len(tops) == 13
    for top, expected in zip(tops, whole["top_logprobs"], strict=True):
        assert top == pytest.approx(expected, abs=1e-4)


def test_prompts_at_the_end_of_the_context(attack):
    async def test(served: Serving):
        answers = {}
        for length in (123, 127, 128, 129):
            answers[length] = await served.complete([5] * length, max_tokens=200, ignore_eos=True)
        return answers

    answers = attack(test)
    assert [answers[length].json()["usage"]["completion_tokens"] for length in (123, 127)] == [5, 1]
    assert [answers[length].status_code for length in (128, 129)] == [400, 400]


def test_salts_share_nothing_and_whole_pages_are_told(attack):
    prompt = [(3 * place) % 290 + 5 for place in range(30)]

    async def test(served: Serving):
        async def cached(**body):
            answer = await ask(served, prompt, return_token_ids=True, **body)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]

        return [
            await cached(**body) for body in ({}, {}, {"cache_salt": "s"}, {"cache_salt": "s"}, {"cache_salt": "t"})
        ]

    answers = attack(test)
    assert [count for count, _ in answers] == [0, 28, 0, 28, 0]
    assert len({tuple(ids) for _, ids in answers}) == 1


def test_usage_that_is_told_all_the_time_rises_to_the_end(attack):
    async def test(served: Serving):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"max_tokens": 7, "ignore_eos": True, "stream": True, "stream_options": options}
        return events((await served.complete([9] * 100, **body)).text)  # computed in four chunks

    usages = [event["usage"] for event in attack(test)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 7
    assert {usage["prompt_tokens"] for usage in usages} == {100}
    assert all(usage["total_tokens"] == 100 + usage["completion_tokens"] for usage in usages)


def test_a_list_with_one_bad_prompt_leaves_nothing_running(attack):
    async def test(served: Serving):
        alone = [await tokens(served, [place] * 6) for place in range(5, 9)]
        refused = [await served.complete([[5] * 6, bad, [6] * 6]) for bad in ([10**9], [5] * 128)]
        body = {"temperature": 0, "ignore_eos": True, "max_tokens": 8, "return_token_ids": True}
        good = (await served.complete([[place] * 6 for place in range(5, 9)], **body)).json()["choices"]
        return refused, alone, [choice["token_ids"] for choice in good], len(served.client.added)

    refused, alone, good, added = attack(test)
    assert [response.status_code for response in refused] == [400, 400]
    assert good == alone
    assert added == 8


def test_gauges_fall_to_zero_when_everybody_has_gone(attack):
    async def test(served: Serving):
        body = {"prompt": PROMPT, "max_tokens": 110, "ignore_eos": True}
        asked = [
            asyncio.ensure_future(served.post("/v1/completions", **body, stream=is_stream))
            for is_stream in (False, True) * 3
        ]
        async with asyncio.timeout(10):
            while served.engine.stats.num_running < 4:
                await asyncio.sleep(0.01)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        async with asyncio.timeout(10):
            while served.engine.num_unfinished or served.engine.stats.num_running:
                await asyncio.sleep(0.01)
        return (await served.http.get("/metrics")).text, await tokens(served, PROMPT, max_tokens=2)

    metrics, after = attack(test)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value_of(metrics, name) == 0
    assert len(after) == 2


def test_after_sleep_nothing_points_to_pages_that_are_gone(attack):
    prompt = [(5 * place) % 290 + 5 for place in range(40)]

    async def test(served: Serving):
        admin = {"Authorization": "Bearer root"}
        before = await tokens(served, prompt)
        codes = [(await served.http.post(path, headers=admin)).status_code for path in ("/sleep", "/wake_up")]
        after = await ask(served, prompt, return_token_ids=True)
        return before, codes, after

    before, codes, after = attack(test, admin_api_key=["root"])
    assert codes == [200, 200]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["choices"][0]["token_ids"] == before


def test_waves_of_short_and_long_prompts_all_end(attack):
    async def test(served: Serving):
        long = [tokens(served, [10 + place] * 110, max_tokens=8) for place in range(3)]
        short = [tokens(served, [100 + place] * 3, max_tokens=4) for place in range(8)]
        answers = await asyncio.gather(*long, *short)
        return [len(answer) for answer in answers], [await tokens(served, [10] * 110, max_tokens=8), answers[0]]

    lengths, (alone, among) = attack(test)  # the pool holds one long request and a little
    assert lengths == [8] * 3 + [4] * 8
    assert alone == among


def test_the_page_names_every_fault_and_tests_that_there_are():
    rows = [
        line.split("|") for line in (ROOT / "docs/known-faults.md").read_text().splitlines() if line.startswith("| B")
    ]
    known = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        known |= set(re.findall(r"def (test_\w+)", path.read_text()))
    assert len(rows) == 64
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row[-2])
        assert named, row
        assert not set(named) - known, row
