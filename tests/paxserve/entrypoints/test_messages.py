import asyncio
import json

import pytest

from tests.paxserve.entrypoints.test_responses import events_of
from tests.paxserve.fake_core import CRASH, SCRIPT
from tests.paxserve.serving import Serving, run

HELLO = [{"role": "user", "content": "Hello"}]


async def message(served: Serving, messages: object = HELLO, path: str = "/v1/messages", **fields):
    return await served.post(path, **{"model": "fake", "max_tokens": 8, "messages": messages, **fields})


def check_error(response, code: int, kind: str) -> str:
    assert response.status_code == code, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert set(body["error"]) == {"type", "message"}
    return body["error"]["message"]


def test_a_message():
    body = run(message).json()
    assert body["id"].startswith("msg-")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake")
    assert body["content"] == [{"type": "text", "text": SCRIPT[:8]}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert body["usage"]["output_tokens"] == 8
    stopped = run(lambda served: message(served, max_tokens=50, stop_sequences=["two"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")


def test_the_events_tell_the_same():
    async def test(served: Serving):
        fields = {"max_tokens": 40, "stop_sequences": ["caf"]}
        return (await message(served, stream=True, **fields)).text, (await message(served, **fields)).json()

    stream, whole = run(test)
    events = events_of(stream)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert events[0]["message"]["stop_reason"] is None
    text = "".join(event["delta"]["text"] for event in events[2:-3])
    assert text == whole["content"][0]["text"] == SCRIPT.split("caf")[0]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "caf"}
    assert events[-2]["usage"] == whole["usage"]
    assert "[DONE]" not in stream


def test_blocks_and_system_become_a_conversation():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "C"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "D"}]},
    ]  # fmt: skip

    async def test(served: Serving):
        served.context.chat_template = (
            "{% for m in messages %}{{ m.role }}={{ m.content }}"
            "{% for c in m.tool_calls or [] %}+{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %};"
            "{% endfor %}"
        )
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        answer = (await message(served, messages, system=system)).json()
        counted = (
            await served.post("/v1/messages/count_tokens", model="fake", messages=messages, system=system)
        ).json()
        prompt = served.client.added[0].prompt_token_ids
        return answer, counted, served.core.tokenizer.decode(prompt), len(prompt)

    answer, counted, prompt, count = run(test)
    assert prompt == "system=Be brief.;user=A\nB;assistant=C+f1;tool=D;"
    assert counted == {"input_tokens": count}
    assert answer["usage"]["input_tokens"] == count


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"), ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"output_config": {"effort": "low"}}, "output_config"), ({"stop_sequences": list("abcde")}, "stop"),
        ({"temperature": 7}, "temperature"), ({"top_p": 0}, "top_p"), ({"colour": 1}, "colour"),
        ({"model": ""}, "model"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused_in_anthropics_shape(fields, word):
    async def test(served: Serving):
        return await message(served, **fields), await message(served, **fields, stream=True)

    for response in run(test):
        assert word in check_error(response, 400, "invalid_request_error")


def test_other_errors_have_that_shape_too():
    async def test(served: Serving):
        headers = {"x-api-key": "secret"}
        body = {"model": "fake", "max_tokens": 1, "messages": HELLO}
        post = served.http.post
        return [
            await post("/v1/messages", json=body),
            await post("/v1/messages", json=body, headers={"x-api-key": "wrong"}),
            await post("/v1/messages", json={**body, "model": "other"}, headers=headers),
            await post("/v1/messages", content="[" * 99, headers={**headers, "content-type": "application/json"}),
            await post("/v1/messages", json=body, headers=headers),
        ]

    nobody, wrong, missing, deep, right = run(test, api_key=["secret"])
    check_error(nobody, 401, "authentication_error")
    check_error(wrong, 401, "authentication_error")
    check_error(missing, 404, "not_found_error")
    check_error(deep, 400, "invalid_request_error")
    assert right.status_code == 200


def test_thinking_can_be_turned_off():
    async def test(served: Serving):
        served.context.chat_template = "{{ enable_thinking }}"
        await message(served, thinking={"type": "disabled"})
        return served.core.tokenizer.decode(served.client.added[0].prompt_token_ids)

    assert run(test) == "False"


def test_an_error_in_mid_stream_is_the_last_event():
    async def test(served: Serving):
        served.core.step_seconds = 0.01
        stream = asyncio.ensure_future(message(served, stream=True, max_tokens=300))
        while not served.core.choices:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await served.complete(CRASH)
        return await stream

    name, payload = run(test).text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(payload[6:])["error"]["type"] == "api_error"
