import asyncio
import json

import pytest

from paxserve.entrypoints.response_store import ResponseStore, StoredResponse
from paxserve.errors import RequestError
from tests.paxserve.entrypoints.test_errors import check_shape
from tests.paxserve.fake_core import CRASH, REFUSE, SCRIPT
from tests.paxserve.serving import Serving, run, until


async def respond(served: Serving, text: object = "Hello", **fields):
    return await served.post("/v1/responses", input=text, **{"max_output_tokens": 8, **fields})


def events_of(text: str) -> list[dict]:
    events = []
    for block in filter(None, text.split("\n\n")):
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_response_has_one_message():
    body = run(respond).json()
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = body["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert item["content"] == [{"type": "output_text", "text": SCRIPT[:8], "annotations": [], "logprobs": []}]
    assert body["usage"]["output_tokens"] == 8
    assert body["usage"]["total_tokens"] == 8 + body["usage"]["input_tokens"]
    assert run(lambda served: respond(served, stop="two", max_output_tokens=50)).json()["status"] == "completed"


def test_the_events_tell_the_same():
    async def test(served: Serving):
        fields = {"stream": True, "top_logprobs": 2, "max_output_tokens": 20}
        return await respond(served, **fields), (await respond(served, **{**fields, "stream": False})).json()

    stream, whole = run(test)
    events = events_of(stream.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = events[4:-4]
    text, final = "".join(event["delta"] for event in deltas), events[-1]["response"]
    assert text == final["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    assert logprobs == whole["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 20
    assert len(logprobs[0]["top_logprobs"]) == 2
    assert final["usage"] == whole["usage"]


def test_items_of_many_shapes_become_a_conversation():
    items = [
        {"role": "user", "content": "A"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "B"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "C"},
        {"role": "user", "content": [{"type": "input_text", "text": "D"}, {"type": "input_text", "text": "E"}]},
    ]

    async def test(served: Serving):
        served.context.chat_template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
        await respond(served, items, instructions="Be brief.")
        return served.core.tokenizer.decode(served.client.added[0].prompt_token_ids)

    assert run(test) == "system=Be brief.;user=A;assistant=B;assistant=;tool=C;user=D\nE;"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"), ({"n": 2}, "n"), ({"max_tokens": 3}, "max_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"), ({"include": ["x"]}, "include"),
        ({"background": True}, "background"), ({"max_output_tokens": 0}, "body.max_output_tokens"),
        ({"input": []}, "input"), ({"input": [{"type": "image"}]}, "input"), ({"input": ""}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"conversation": "c"}, "conversation"), ({"temperature": 9}, "temperature"), ({"made_up": 1}, "made_up"),
        ({"top_logprobs": 21}, "logprobs"), ({"reasoning": {"effort": "huge"}}, "body.reasoning.effort"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused(fields, param):
    async def test(served: Serving):
        body = {"input": "Hi", **fields}
        return await served.post("/v1/responses", **body), await served.post("/v1/responses", **body, stream=True)

    for response in run(test):
        assert check_shape(response, 400)["param"] == param


def test_without_a_store_nothing_is_kept():
    async def test(served: Serving):
        first = (await respond(served, store=True)).json()
        return (
            first["store"],
            await served.http.get(f"/v1/responses/{first['id']}"),
            await respond(served, previous_response_id=first["id"]),
            await served.http.post("/v1/responses/none/cancel"),
        )

    stored, *missing = run(test)
    assert stored is False
    for response in missing:
        check_shape(response, 404, "NotFoundError")


def test_a_stored_response_is_retrieved_and_continued():
    async def test(served: Serving):
        first = (await respond(served, "A", instructions="X")).json()
        streamed = events_of((await respond(served, "B", stream=True)).text)[-1]["response"]
        kept = [(await served.http.get(f"/v1/responses/{entry['id']}")).json() for entry in (first, streamed)]
        unstored = (await respond(served, "A", store=False)).json()
        gone = await served.http.get(f"/v1/responses/{unstored['id']}")
        await respond(served, "C", previous_response_id=first["id"], instructions="Y")
        prompt = served.core.tokenizer.decode(served.client.added[-1].prompt_token_ids, skip_special_tokens=False)
        check_shape(await served.http.post(f"/v1/responses/{first['id']}/cancel"), 400)
        return [first, streamed], kept, gone, prompt

    made, kept, gone, prompt = run(test, enable_responses_store=True)
    assert kept == made
    check_shape(gone, 404)
    texts = [part.split("\n", 1)[1] for part in prompt.replace("<|im_end|>\n", "").split("<|im_start|>")[1:-1]]
    assert texts == ["Y", "A", SCRIPT[:8], "C"]


def test_the_oldest_make_room():
    async def test(served: Serving):
        ids = [(await respond(served)).json()["id"] for _ in range(4)]
        return [(await served.http.get(f"/v1/responses/{response_id}")).status_code for response_id in ids]

    assert run(test, enable_responses_store=True, max_stored_responses=2) == [404, 404, 200, 200]


def test_much_text_makes_room_too():
    def stored(name: str, length: int) -> StoredResponse:
        return StoredResponse({"id": name, "background": False}, [{"role": "user", "content": "x" * length}])

    store = ResponseStore(10, max_characters=10_000)
    for name, length in (("a", 3000), ("b", 3000), ("c", 3000)):
        store.put(stored(name, length))
    assert store.get("c")
    assert store.get("b")
    with pytest.raises(RequestError):
        store.get("a")
    store.put(stored("huge", 50_000))
    assert store.get("huge")
    with pytest.raises(RequestError):
        store.get("c")


def test_too_much_in_the_background_is_refused():
    async def test(served: Serving):
        served.core.step_seconds = 0.005
        answers = [await respond(served, background=True, max_output_tokens=300) for _ in range(3)]
        for answer in answers[:2]:
            await served.http.post(f"/v1/responses/{answer.json()['id']}/cancel")
        await until(lambda: not served.core.choices)
        return answers

    answers = run(test, enable_responses_store=True, max_stored_responses=2)
    assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_background_responses_end_or_are_cancelled():
    async def test(served: Serving):
        served.core.step_seconds = 0.005
        quick = (await respond(served, background=True)).json()
        long = (await respond(served, background=True, max_output_tokens=400)).json()
        failed = (await respond(served, REFUSE, background=True)).json()
        path = "/v1/responses/"
        for _ in range(400):
            quick_now = (await served.http.get(path + quick["id"])).json()
            if quick_now["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.01)
        running = (await served.http.get(path + long["id"])).json()["status"]
        cancelled = (await served.http.post(path + long["id"] + "/cancel")).json()["status"]
        failed_now = (await served.http.get(path + failed["id"])).json()
        await until(lambda: not served.core.choices)
        return quick, quick_now, running, cancelled, failed_now

    quick, quick_now, running, cancelled, failed = run(test, enable_responses_store=True)
    assert quick["status"] == "queued"
    assert quick_now["output"][0]["content"][0]["text"] == SCRIPT[:8]
    assert (running, cancelled) == ("in_progress", "cancelled")
    assert failed["status"] == "failed"
    assert failed["error"]["message"] == "This prompt can never run."


def test_a_stream_in_the_background_is_left_and_followed_again():
    async def test(served: Serving):
        served.core.step_seconds = 0.005
        asked = {"model": "fake", "input": "Hello", "max_output_tokens": 60, "background": True, "stream": True}
        async with served.http.stream("POST", "/v1/responses", json=asked) as stream:
            whole = await stream.aread()
        first = events_of(whole.decode())
        path = f"/v1/responses/{first[0]['response']['id']}"
        again = await served.http.get(path, params={"stream": True})
        late = await served.http.get(path, params={"stream": True, "starting_after": 9})
        stored = (await served.http.get(path)).json()
        left = asyncio.ensure_future(served.post("/v1/responses", **asked))
        while not served.core.choices:
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        newest = next(reversed(served.context.responses._responses))
        followed = events_of((await served.http.get(f"/v1/responses/{newest}", params={"stream": True})).text)
        return first, events_of(again.text), events_of(late.text), stored, followed

    first, again, late, stored, followed = run(test, enable_responses_store=True)
    assert [event["sequence_number"] for event in first] == list(range(len(first)))
    assert again == first
    assert late == first[10:]
    assert first[-1]["type"] == followed[-1]["type"] == "response.completed"
    assert first[-1]["response"] == stored
    assert stored["output"][0]["content"][0]["text"].startswith(SCRIPT)


def test_a_stream_in_the_background_that_fails_or_is_cancelled_ends():
    async def test(served: Serving):
        served.core.step_seconds = 0.005
        failed = await respond(served, REFUSE, background=True, stream=True)
        running = asyncio.ensure_future(respond(served, background=True, stream=True, max_output_tokens=400))
        while not served.core.choices:
            await asyncio.sleep(0.01)
        newest = next(reversed(served.context.responses._responses))
        await served.http.post(f"/v1/responses/{newest}/cancel")
        plain = (await respond(served)).json()["id"]
        refused = [
            await served.http.get(f"/v1/responses/{plain}", params=params)
            for params in ({"stream": True}, {"starting_after": 3}, {"stream": True, "starting_after": -2})
        ]
        return events_of(failed.text), events_of((await running).text), refused, served.core.choices

    failed, cancelled, refused, left = run(test, enable_responses_store=True)
    assert failed[-1]["response"]["error"]["message"] == "This prompt can never run."
    assert (failed[-1]["response"]["status"], cancelled[-1]["response"]["status"]) == ("failed", "cancelled")
    for response in refused:
        check_shape(response, 400)
    assert not left


def test_an_error_in_mid_stream_is_the_last_event():
    async def test(served: Serving):
        served.core.step_seconds = 0.01
        stream = asyncio.ensure_future(respond(served, stream=True, max_output_tokens=300))
        while not served.core.choices:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await served.complete(CRASH)
        return await stream

    last = events_of(run(test).text)[-1]
    assert last["type"] == "error"
    assert "the device is on fire" in last["message"]
