import json

import pytest

from tests.paxserve.fake_core import SCRIPT
from tests.paxserve.serving import Serving, run
from tests.small_tokenizers import byte_level_tokenizer


def events(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_answers_with_the_models_text_and_counts():
    async def test(served: Serving):
        return (await served.complete("Hello", max_tokens=8)).json()

    body = run(test)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["text"] == SCRIPT[:8]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    prompt_tokens = len(byte_level_tokenizer().encode("Hello"))
    assert body["usage"]["prompt_tokens"] == prompt_tokens
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == prompt_tokens + 8
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_max_tokens_is_16_when_not_given():
    async def test(served: Serving):
        bodies = [(await served.complete(**extra)).json() for extra in ({}, {"max_tokens": None})]
        return [body["usage"]["completion_tokens"] for body in bodies]

    assert run(test) == [16, 16]


def test_streamed_text_and_ids_equal_the_whole_answer():
    async def test(served: Serving):
        plain = await served.complete(max_tokens=24, return_token_ids=True)
        stream = await served.complete(max_tokens=24, return_token_ids=True, stream=True)
        return plain.json()["choices"][0], events(stream)

    plain, chunks = run(test)
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert "".join(delta["text"] for delta in deltas) == plain["text"]
    assert [token for delta in deltas for token in delta["token_ids"]] == plain["token_ids"]
    assert deltas[0]["prompt_token_ids"] == plain["prompt_token_ids"] == byte_level_tokenizer().encode("Hello")
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert set(chunks[0]) == {"id", "object", "created", "model", "choices"}
    assert set(deltas[0]) == {
        "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids",
    }  # fmt: skip


def test_characters_of_several_tokens_are_streamed_whole():
    async def test(served: Serving):
        return events(await served.complete(max_tokens=60, stream=True))

    texts = [chunk["choices"][0]["text"] for chunk in run(test)]
    assert "�" not in "".join(texts)
    assert "".join(texts).startswith(SCRIPT)


def test_usage_chunk_comes_last_and_only_when_asked_for():
    async def test(served: Serving):
        options = {"include_usage": True}
        last = events(await served.complete(max_tokens=5, stream=True, stream_options=options, cache_salt="warm"))
        options["continuous_usage_stats"] = True
        every = events(await served.complete(max_tokens=5, stream=True, stream_options=options))
        return last, every

    last, every = run(test)
    assert last[-1]["choices"] == []
    assert last[-1]["usage"] == {
        "prompt_tokens": 1, "total_tokens": 6, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16},
    }  # fmt: skip
    assert all("usage" not in chunk for chunk in last[:-1])
    counts = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_prompt_lists_keep_their_order_with_n_choices_each():
    async def test(served: Serving):
        ids = byte_level_tokenizer().encode("Hi there")
        texts = (await served.complete(["a", "b"], n=2, max_tokens=3, temperature=1)).json()
        token_lists = (await served.complete([ids, ids], max_tokens=3)).json()
        one_list = (await served.complete(ids, max_tokens=3)).json()
        return texts, token_lists, one_list, len(ids)

    texts, token_lists, one_list, length = run(test)
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert texts["usage"]["completion_tokens"] == 12
    assert [choice["index"] for choice in token_lists["choices"]] == [0, 1]
    assert token_lists["usage"]["prompt_tokens"] == 2 * length
    assert one_list["usage"]["prompt_tokens"] == length


def test_streamed_choices_are_told_apart_by_index():
    async def test(served: Serving):
        return events(await served.complete(["a", "b"], n=2, max_tokens=6, stream=True))

    texts: dict[int, str] = {}
    for chunk in run(test):
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(4), SCRIPT[:6])


def test_stop_strings_end_the_answer_and_the_request():
    async def test(served: Serving):
        plain = await served.complete(max_tokens=100, stop=["thr"])
        kept = await served.complete(max_tokens=100, stop="thr", include_stop_str_in_output=True)
        stream = events(await served.complete(max_tokens=100, stop=["thr"], stream=True))
        return plain.json()["choices"][0], kept.json()["choices"][0], stream, served.core.choices

    plain, kept, stream, running = run(test)
    assert (plain["text"], plain["finish_reason"], plain["stop_reason"]) == ("One two ", "stop", "thr")
    assert kept["text"] == "One two thr"
    assert "".join(chunk["choices"][0]["text"] for chunk in stream) == "One two "
    assert stream[-1]["choices"][0]["stop_reason"] == "thr"
    assert not running


def test_stop_token_ids_are_named_as_the_reason():
    (space,) = byte_level_tokenizer().encode(" ")

    async def test(served: Serving):
        return (await served.complete(max_tokens=100, stop_token_ids=[space])).json()["choices"][0]

    choice = run(test)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("One", "stop", space)


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(is_stream):
    async def test(served: Serving):
        response = await served.complete("Hello dog", max_tokens=6, echo=True, logprobs=2, stream=is_stream)
        return events(response) if is_stream else [response.json()]

    choices = [chunk["choices"][0] for chunk in run(test)]
    text = "".join(choice["text"] for choice in choices)
    assert text == "Hello dog" + SCRIPT[:6]
    joined = {
        name: [entry for choice in choices for entry in choice["logprobs"][name]] for name in choices[0]["logprobs"]
    }
    length = len(byte_level_tokenizer().encode("Hello dog")) + 6
    assert {len(entries) for entries in joined.values()} == {length}
    assert "".join(joined["tokens"]) == text
    offsets, tokens = joined["text_offset"], joined["tokens"]
    assert offsets == [len("".join(tokens[:place])) for place in range(length)]
    assert joined["token_logprobs"][0] is None
    assert joined["top_logprobs"][0] is None
    assert all(value == -0.5 for value in joined["token_logprobs"][1:])
    assert all(token in top for token, top in zip(tokens[1:], joined["top_logprobs"][1:], strict=True))


def test_echo_of_token_ids_is_their_text():
    async def test(served: Serving):
        ids = byte_level_tokenizer().encode("Hi there")
        return (await served.complete(ids, max_tokens=2, echo=True)).json()["choices"][0]["text"]

    assert run(test) == "Hi there" + SCRIPT[:2]


def test_no_tokens_with_echo_scores_the_prompt_only():
    async def test(served: Serving):
        plain = (await served.complete("Hello dog", max_tokens=0, echo=True, logprobs=1)).json()
        stream = events(await served.complete("Hello dog", max_tokens=0, echo=True, stream=True))
        return plain, stream

    plain, stream = run(test)
    (choice,) = plain["choices"]
    assert choice["text"] == "Hello dog"
    assert choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == "Hello dog"
    assert plain["usage"]["completion_tokens"] == 0
    assert "".join(chunk["choices"][0]["text"] for chunk in stream) == "Hello dog"


def test_logprobs_zero_gives_the_chosen_tokens():
    async def test(served: Serving):
        return (await served.complete(max_tokens=4, logprobs=0)).json()["choices"][0]["logprobs"]

    logprobs = run(test)
    assert logprobs["tokens"] == ["O", "n", "e", " "]
    assert logprobs["top_logprobs"] == [{token: -0.5} for token in logprobs["tokens"]]


def test_streamed_logprobs_equal_the_plain_ones():
    async def test(served: Serving):
        plain = (await served.complete(max_tokens=24, logprobs=3)).json()["choices"][0]["logprobs"]
        return plain, events(await served.complete(max_tokens=24, logprobs=3, stream=True))

    plain, chunks = run(test)
    for name, entries in plain.items():
        assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"][name]] == entries


def test_prompt_logprobs_are_maps_by_token_id():
    async def test(served: Serving):
        body = (await served.complete("Hello dog", max_tokens=1, prompt_logprobs=1)).json()
        return body["choices"][0]["prompt_logprobs"]

    ids = byte_level_tokenizer().encode("Hello dog")
    entries = run(test)
    assert entries[0] is None
    assert len(entries) == len(ids)
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert entry[str(token_id)]["logprob"] == -0.5
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}


def test_tokens_can_be_shown_as_ids():
    async def test(served: Serving):
        body = await served.complete(max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
        return body.json()["choices"][0]["logprobs"]["tokens"]

    assert run(test) == [f"token_id:{byte_level_tokenizer().encode('O')[0]}"]


def test_every_sampling_field_reaches_the_engine():
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "presence_penalty": 0.25,
        "frequency_penalty": 0.5, "repetition_penalty": 1.5, "stop": ["x"], "stop_token_ids": [5],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1, "logit_bias": {"7": 2.0},
        "allowed_token_ids": [7, 8], "bad_words": ["bad"], "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "truncate_prompt_tokens": 1,
    }  # fmt: skip

    async def test(served: Serving):
        response = await served.complete(max_tokens=3, cache_salt="pepper", priority=-2, **fields)
        assert response.status_code == 200, response.text
        return served.client.added[0]

    request = run(test)
    for name, value in fields.items():
        assert getattr(request.params, name) == ({7: 2.0} if name == "logit_bias" else value)
    assert (request.cache_salt, request.priority) == ("pepper", -2)
    assert len(request.prompt_token_ids) == 1


def test_the_models_own_defaults_are_used_unless_the_request_says_otherwise():
    async def test(served: Serving):
        await served.complete(max_tokens=1)
        await served.complete(max_tokens=1, temperature=1.0)
        return [request.params for request in served.client.added]

    overrides = {"temperature": 0.25, "top_k": 9}
    default, asked = run(test, model={"override_generation_config": overrides})
    assert (default.temperature, default.top_k) == (0.25, 9)
    assert (asked.temperature, asked.top_k) == (1.0, 9)


def test_equal_request_ids_do_not_meet():
    async def test(served: Serving):
        headers = {"X-Request-Id": "mine"}
        body = {"prompt": "Hi", "max_tokens": 3}
        first = await served.http.post("/v1/completions", json=body, headers=headers)
        second = await served.http.post("/v1/completions", json={**body, "request_id": "other"}, headers=headers)
        odd = await served.http.post("/v1/completions", json=body, headers={"X-Request-Id": "a/b@c"})
        return first.json()["id"], second.json()["id"], odd.json()["id"], served.client.added

    first, second, odd, added = run(test)
    assert first == second == "cmpl-mine"
    assert "/" not in odd
    assert len({request.request_id for request in added}) == 3


def test_a_server_without_tokenizer_works_on_ids_and_refuses_text():
    async def test(served: Serving):
        ids = await served.complete([5, 6], max_tokens=2, return_token_ids=True, logprobs=1)
        text = await served.complete("Hello")
        chat = await served.chat()
        return ids, text, chat

    ids, text, chat = run(test, model={"skip_tokenizer_init": True})
    assert len(ids.json()["choices"][0]["token_ids"]) == 2
    assert text.status_code == chat.status_code == 400
    assert "skip_tokenizer_init" in text.json()["error"]["message"]
