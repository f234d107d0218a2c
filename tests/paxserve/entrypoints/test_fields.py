"""Fields of requests and settings of answers beyond plain sampling: each does what it says, or is refused by name."""

import json

import pytest

from paxserve.entrypoints.protocol.fields import NEUTRAL
from tests.paxserve.entrypoints.test_errors import check_shape
from tests.paxserve.fake_core import SCRIPT
from tests.paxserve.serving import Serving, run
from tests.small_tokenizers import byte_level_tokenizer


def chunks_of(response) -> list[dict]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("asked", "server", "interval"), [(5, 1, 5), (None, 4, 4), (2, 4, 4), (None, 1, 1)])
def test_chunks_have_at_least_so_many_tokens(asked, server, interval):
    async def test(served: Serving):
        served.core.step_seconds = 0.001
        fields = {"stream": True, "max_tokens": 23, "return_token_ids": True, "n": 2, "temperature": 1}
        return await served.complete(**fields, **({"stream_interval": asked} if asked else {}))

    response = run(test, stream_interval=server)
    for index in (0, 1):
        choices = [c for chunk in chunks_of(response) for c in chunk["choices"] if c["index"] == index]
        sizes = [len(choice["token_ids"]) for choice in choices]
        assert sum(sizes) == 23
        assert all(size >= interval for size in sizes[1:-1])
        assert len(sizes) > 1
        if interval > 1:
            assert len(sizes) <= 2 + 22 // interval
        assert "".join(choice["text"] for choice in choices).startswith(SCRIPT[:10])


@pytest.mark.parametrize("stream_interval", [0, -1, "x"])
def test_intervals_that_are_none(stream_interval):
    check_shape(run(lambda served: served.complete(stream_interval=stream_interval)), 400)


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8, 9]), ("right", [5, 6, 7]), (None, [7, 8, 9])])
def test_long_prompts_are_cut_on_the_side_that_is_named(side, kept):
    async def test(served: Serving):
        await served.complete([5, 6, 7, 8, 9], max_tokens=1, truncate_prompt_tokens=3, truncation_side=side)
        return served.client.added[0].prompt_token_ids

    assert run(test) == kept
    check_shape(run(lambda served: served.complete(truncation_side="middle")), 400)


def test_an_answer_that_goes_round_in_circles_is_ended():
    period = len(byte_level_tokenizer().encode(SCRIPT, add_special_tokens=False))
    limit = {"max_pattern_size": 60, "min_pattern_size": 3, "min_count": 3}

    async def test(served: Serving):
        plain = (await served.complete(max_tokens=200, repetition_detection=limit)).json()["choices"][0]
        stream = await served.complete(max_tokens=200, repetition_detection=limit, stream=True)
        short = await served.complete(max_tokens=200, repetition_detection={**limit, "max_pattern_size": period - 1})
        metrics = (await served.http.get("/metrics")).text
        return plain, chunks_of(stream)[-1], short.json()["choices"][0], metrics, served.core.choices

    plain, last, short, metrics, running = run(test)
    assert plain["finish_reason"] == last["choices"][0]["finish_reason"] == "repetition"
    assert plain["text"] == SCRIPT * 3
    assert short["finish_reason"] == "length"
    assert 'vllm:request_success_total{engine="0",finished_reason="repetition",model_name="fake"} 2.0' in metrics
    assert not running


@pytest.mark.parametrize(
    "limit",
    [{}, {"max_pattern_size": 0}, {"max_pattern_size": 3, "min_pattern_size": 4}, {"max_pattern_size": 10**9},
     {"max_pattern_size": 3, "min_count": 1}, {"max_pattern_size": 3, "colour": 1}, 5],
)  # fmt: skip
def test_repetitions_that_cannot_be_looked_for(limit):
    error = check_shape(run(lambda served: served.complete(repetition_detection=limit)), 400)
    assert "repetition_detection" in error["param"]


def test_the_text_of_the_prompt_can_be_asked_for():
    async def test(served: Serving):
        whole = (await served.chat(max_tokens=1, return_prompt_text=True)).json()
        first = chunks_of(await served.chat(max_tokens=1, return_prompt_text=True, stream=True))[0]
        return whole["prompt_text"], first["prompt_text"], (await served.chat(max_tokens=1)).json()["prompt_text"]

    whole, first, without = run(test)
    assert whole == first == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert without is None


def test_usage_can_be_forced_and_its_details_left_out():
    async def test(served: Serving):
        stream = chunks_of(await served.complete(max_tokens=2, stream=True))
        return stream, (await served.complete(max_tokens=2, cache_salt="warm")).json()["usage"]

    stream, usage = run(test)
    assert not any("usage" in chunk for chunk in stream)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    stream, usage = run(test, enable_force_include_usage=True, enable_prompt_tokens_details=False)
    assert [chunk["choices"] for chunk in stream if "usage" in chunk] == [[]]
    assert stream[-1]["usage"] == {"prompt_tokens": 1, "total_tokens": 3, "completion_tokens": 2}
    assert usage["prompt_tokens_details"] is None


async def shown_prompt(served: Serving, **fields) -> str:
    tokens = (await served.post("/tokenize", messages=[{"role": "user", "content": "Hi"}], **fields)).json()["tokens"]
    return (await served.post("/detokenize", tokens=tokens)).json()["prompt"]


def test_the_templates_arguments_have_defaults_that_requests_override():
    async def test(served: Serving):
        served.context.chat_template = "{{ mood }}, {{ place }}"
        return await shown_prompt(served), await shown_prompt(served, chat_template_kwargs={"mood": "sad"})

    assert run(test, default_chat_template_kwargs={"mood": "glad", "place": "here"}) == ("glad, here", "sad, here")


@pytest.mark.parametrize(("form", "shown"), [("string", "Hi"), ("openai", "text=Hi"), ("auto", "Hi")])
def test_the_form_of_contents_can_be_set(form, shown):
    async def test(served: Serving):
        served.context.chat_template = (
            "{% set c = messages[0].content %}{{ c if c is string else c[0].type + '=' + c[0].text }}"
        )
        return await shown_prompt(served)

    assert run(test, chat_template_content_format=form) == shown


def test_tools_that_must_not_be_called_can_be_kept_from_the_template():
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def test(served: Serving):
        served.context.chat_template = "{{ tools | length if tools else 0 }}"
        await served.chat(max_tokens=1, tools=tools, tool_choice="none")
        return served.client.added[0].prompt_token_ids

    encode = byte_level_tokenizer().encode
    assert run(test) == encode("1", add_special_tokens=False)
    assert run(test, exclude_tools_when_tool_choice_none=True) == encode("0", add_special_tokens=False)


def test_tokens_are_shown_as_ids_when_the_server_says_so():
    async def test(served: Serving):
        mine = (await served.complete(max_tokens=1, logprobs=0)).json()["choices"][0]["logprobs"]["tokens"]
        fields = {"logprobs": 0, "return_tokens_as_token_ids": False}
        return mine, (await served.complete(max_tokens=1, **fields)).json()["choices"][0]["logprobs"]["tokens"]

    ids, texts = run(test, return_tokens_as_token_ids=True)
    assert ids[0].startswith("token_id:")
    assert texts == [SCRIPT[0]]


@pytest.mark.parametrize("name", sorted(set(NEUTRAL) - {"function_call", "functions"}))
def test_what_is_known_and_not_offered_is_refused_by_name_unless_it_asks_for_nothing(name):
    async def test(served: Serving):
        refused = [await served.complete(**{name: "odd"}), await served.chat(**{name: "odd"})]
        neutral = [await served.complete(max_tokens=1, **{name: value}) for value in (None, *NEUTRAL[name])]
        return refused, neutral

    refused, neutral = run(test)
    for response in refused:
        error = check_shape(response, 400, "BadRequestError")
        assert error["param"] == name
        assert name in error["message"]
    assert {response.status_code for response in neutral} == {200}


@pytest.mark.parametrize(
    ("name", "instead"),
    [("guided_json", "structured_outputs"), ("guided_regex", "structured_outputs"), ("best_of", "use n"),
     ("guided_choice", "structured_outputs"), ("guided_grammar", "structured_outputs"),
     ("functions", "tools"), ("function_call", "tool_choice"), ("max_new_tokens", "max_tokens")],
)  # fmt: skip
def test_removed_fields_are_refused_with_what_replaced_them(name, instead):
    error = check_shape(run(lambda served: served.chat(**{name: {"x": 1}})), 400)
    assert instead in error["message"]


def test_the_load_is_told_in_a_header_to_those_who_ask():
    async def test(served: Serving):
        name, body = "endpoint-load-metrics-format", {"prompt": "x"}
        answers = [
            await served.http.post("/v1/completions", json=body, headers={name: form})
            for form in ("text", "JSON", "odd")
        ]
        return [answer.headers.get("endpoint-load-metrics") for answer in answers]

    text, as_json, odd = run(test)
    assert text.startswith("TEXT named_metrics.kv_cache_usage_perc=")
    assert text.endswith(", named_metrics.num_requests_waiting=0.0")
    assert set(json.loads(as_json.removeprefix("JSON "))["named_metrics"]) == {
        "kv_cache_usage_perc", "num_requests_waiting",
    }  # fmt: skip
    assert odd is None


def test_the_priority_may_come_as_a_header():
    async def test(served: Serving):
        post = served.http.post
        body = {"prompt": "x", "max_tokens": 1, "priority": 3}
        await post("/v1/completions", json=body, headers={"X-Vllm-Priority": "-7"})
        await post("/v1/completions", json=body)
        wrong = [
            await post("/v1/completions", json=body, headers={"X-Vllm-Priority": value})
            for value in ("x", "1.5", "9" * 30)
        ]
        return [request.priority for request in served.client.added], wrong

    priorities, wrong = run(test)
    assert priorities == [-7, 3]
    for response in wrong:
        assert check_shape(response, 400)["param"] == "priority"
