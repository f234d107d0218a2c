import json

import pytest

from tests.paxserve.fake_core import SCRIPT
from tests.paxserve.serving import Serving, run
from tests.small_tokenizers import byte_level_tokenizer

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def events(response):
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def prompt_of(served: Serving) -> str:
    return byte_level_tokenizer().decode(served.client.added[-1].prompt_token_ids, skip_special_tokens=False)


def test_answers_with_a_message():
    async def test(served: Serving):
        response = await served.chat("Hi", max_tokens=8)
        return response.json(), prompt_of(served)

    body, prompt = run(test)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == SCRIPT[:8]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 8


def test_without_a_limit_the_context_is_the_limit():
    async def test(served: Serving):
        body = (await served.chat("Hi")).json()
        return body["usage"]["total_tokens"], served.context.model_info.max_model_len

    total, limit = run(test)
    assert total == limit


def test_max_completion_tokens_wins():
    async def test(served: Serving):
        return (await served.chat(max_tokens=9, max_completion_tokens=4)).json()["usage"]["completion_tokens"]

    assert run(test) == 4


def test_stream_has_role_deltas_finish_and_usage():
    async def test(served: Serving):
        options = {"include_usage": True}
        return events(await served.chat(max_tokens=8, stream=True, stream_options=options))

    chunks = run(test)
    first = {key: value for key, value in chunks[0].items() if key not in ("id", "created")}
    assert first == {
        "object": "chat.completion.chunk",
        "model": "fake",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
        "prompt_token_ids": None,
        "prompt_text": None,
    }
    deltas = [chunk["choices"][0] for chunk in chunks[1:-1]]
    assert "".join(delta["delta"]["content"] for delta in deltas) == SCRIPT[:8]
    assert set(deltas[0]) - {"stop_reason"} == {"index", "delta", "logprobs", "finish_reason", "token_ids"}
    assert deltas[-1]["finish_reason"] == "length"
    assert deltas[-1]["stop_reason"] is None
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert "system_fingerprint" in chunks[-1]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_the_fingerprint_is_on_the_finish_chunk_when_no_usage_follows():
    async def test(served: Serving):
        return events(await served.chat(max_tokens=2, stream=True))

    chunks = run(test)
    assert "system_fingerprint" in chunks[-1]
    assert "system_fingerprint" not in chunks[0]


def test_every_choice_has_its_role_chunk():
    async def test(served: Serving):
        return events(await served.chat(max_tokens=4, n=3, stream=True))

    chunks = run(test)
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert roles == [0, 1, 2]
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"]["content"]
    assert texts == dict.fromkeys(range(3), SCRIPT[:4])


@pytest.mark.parametrize(("extra", "num_top"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 2}, 2)])
def test_logprobs_have_an_entry_for_each_token(extra, num_top):
    async def test(served: Serving):
        plain = (await served.chat(max_tokens=24, logprobs=True, **extra)).json()["choices"][0]
        stream = events(await served.chat(max_tokens=24, logprobs=True, stream=True, **extra))
        return plain, stream

    plain, stream = run(test)
    content = plain["logprobs"]["content"]
    assert len(content) == 24
    spelt = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelt.decode(errors="replace") == plain["message"]["content"]
    assert all(len(entry["top_logprobs"]) == num_top for entry in content)
    streamed = [entry for chunk in stream for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {
            "name": "f", "arguments": "{\"a\": 1}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "18"}],
        [USER, {"role": "assistant", "content": [], "tool_calls": []}, USER],
        [USER, {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}, {**USER, "name": "sam"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}],
        [{"role": "developer", "content": "Be brief."}, USER],
    ],
)  # fmt: skip
def test_history_of_many_shapes_is_accepted(messages):
    async def test(served: Serving):
        return await served.post("/v1/chat/completions", messages=messages, max_tokens=2)

    response = run(test)
    assert response.status_code == 200, response.text


def test_the_last_message_can_be_continued_and_echoed():
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 4}

    async def test(served: Serving):
        plain = (await served.chat(**fields, echo=True)).json()
        prompt = prompt_of(served)
        stream = events(await served.chat(**fields, echo=True, stream=True))
        return plain["choices"][0]["message"], prompt, stream

    message, prompt, stream = run(test)
    assert prompt.endswith("<|im_start|>assistant\nOnce upon")
    assert message == {**message, "role": "assistant", "content": "Once upon" + SCRIPT[:4]}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in stream) == message["content"]


def test_the_effort_and_other_arguments_reach_the_template():
    async def test(served: Serving):
        served.context.chat_template = "{{ reasoning_effort }} {{ enable_thinking }} {{ colour }} {{ documents }}"
        fields = {"reasoning_effort": "none", "chat_template_kwargs": {"colour": "red"}, "documents": [{"a": 1}]}
        response = await served.chat(max_tokens=1, **fields)
        return response, prompt_of(served)

    response, prompt = run(test)
    assert response.status_code == 200, response.text
    assert prompt == "none False red [{'a': 1}]"


def test_tools_are_shown_to_the_template_when_none_may_be_called():
    async def test(served: Serving):
        served.context.chat_template = "{{ tools[0].function.name }}"
        with_tools = await served.chat(max_tokens=1, tools=[TOOL], tool_choice="none", parallel_tool_calls=True)
        prompt = prompt_of(served)
        served.context.chat_template = None
        return with_tools, prompt, await served.chat(max_tokens=1, tool_choice="none")

    with_tools, prompt, without = run(test)
    assert with_tools.status_code == without.status_code == 200
    assert prompt == "f"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": []}, "body.tools"),
        ({"tools": [5]}, "body.tools.0"),
        ({"tools": [{"type": "function"}]}, "body.tools.0.function"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"messages": []}, "body.messages"),
        ({"messages": [{"content": "no role"}]}, "body.messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"reasoning_effort": "enormous"}, "body.reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, param):
    async def test(served: Serving):
        plain, stream = await served.chat(**fields), await served.chat(**fields, stream=True)
        return plain, stream, served.client.added

    plain, stream, added = run(test)
    assert plain.status_code == stream.status_code == 400, plain.text
    error = plain.json()["error"]
    assert error["param"] == param
    assert error["code"] == 400
    assert stream.json()["error"] == error
    assert not added


def test_fields_of_openai_clients_that_ask_for_nothing_are_accepted():
    fields = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "k", "prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": None, "functions": None,
        "stream_options": None, "reasoning_effort": None, "use_beam_search": False, "priority": 0,
    }  # fmt: skip

    async def test(served: Serving):
        return await served.chat(max_tokens=1, **fields)

    response = run(test)
    assert response.status_code == 200, response.text


def test_a_batch_has_a_choice_for_each_conversation():
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
    path = "/v1/chat/completions/batch"

    async def test(served: Serving):
        body = (await served.post(path, messages=conversations, max_tokens=4, logprobs=True)).json()
        single = (await served.post("/v1/chat/completions", messages=conversations[1], max_tokens=4)).json()
        refused = [
            await served.post(path, messages=conversations, **fields)
            for fields in ({"stream": True}, {"n": 2}, {"tools": [TOOL], "tool_choice": "none"}, {"temperature": 9})
        ]
        refused += [await served.post(path, messages=[[]]), await served.post(path, messages=conversations * 400)]
        return body, single, refused

    body, single, refused = run(test)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {SCRIPT[:4]}
    assert all(len(choice["logprobs"]["content"]) == 4 for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == 3 * single["usage"]["prompt_tokens"]
    assert {response.status_code for response in refused} == {400}
