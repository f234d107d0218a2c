import asyncio
import json
from contextlib import aclosing

import pytest

from paxserve.entrypoints.sse import KEEP_ALIVE, event, with_comments
from tests.paxserve.serving import Serving, run


class Connection:
    """A client at the level of ASGI, that leaves when it wants to."""

    def __init__(self, served: Serving, body: bytes, leave_after: int) -> None:
        self.served, self.body, self.leave_after = served, body, leave_after
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self.is_read = False

    async def receive(self):
        if not self.is_read:
            self.is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if len(self.sent) > self.leave_after:
            self.gone.set()

    async def request(self) -> None:
        headers = [(b"content-type", b"application/json"), (b"host", b"test")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": headers, "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        await self.served.app(scope, self.receive, self.send)


async def wait_until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_stream", ["true", "false"])
def test_a_client_that_leaves_aborts_its_request(is_stream):
    body = f'{{"prompt": ["a", "b"], "max_tokens": 400, "n": 2, "stream": {is_stream}}}'.encode()

    async def test(served: Serving):
        served.core.step_seconds = 0.005
        connection = Connection(served, body, leave_after=3)
        answering = asyncio.ensure_future(connection.request())
        await wait_until(lambda: served.core.choices)
        assert len(served.core.choices) == 4
        if is_stream == "false":
            connection.gone.set()
        await asyncio.wait_for(answering, 5)
        await wait_until(lambda: not served.core.choices)
        assert served.engine.num_unfinished == 0
        assert served.engine.output_processor.num_unfinished == 0
        await wait_until(lambda: served.engine.stats.num_running == 0)
        metrics = (await served.http.get("/metrics")).text
        return connection.sent, metrics

    sent, metrics = run(test)
    assert len(sent) < 40
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in metrics
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="fake"} 4.0' in metrics


def test_a_slow_client_holds_up_nobody_and_loses_nothing():
    body = b'{"prompt": "a", "max_tokens": 200, "stream": true, "return_token_ids": true}'

    async def test(served: Serving):
        connection = Connection(served, body, leave_after=10**9)
        may_go_on = asyncio.Event()
        send = connection.send

        async def slow_send(message):
            await send(message)
            if len(connection.sent) == 3:
                await may_go_on.wait()

        connection.send = slow_send  # type: ignore[method-assign]
        answering = asyncio.ensure_future(connection.request())
        other = await served.complete("b", max_tokens=200)
        assert other.status_code == 200
        await wait_until(lambda: not served.core.choices)
        assert not answering.done()
        may_go_on.set()
        await asyncio.wait_for(answering, 5)
        return other.json()["choices"][0]["text"], b"".join(message.get("body", b"") for message in connection.sent)

    text, streamed = run(test)
    events = [json.loads(block[6:]) for block in streamed.decode().split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 200
    assert len(events) < 150


def test_events_hold_nothing_that_anybody_takes_for_the_end_of_a_line():
    text = "".join(map(chr, range(0x3000))) + "’“”"
    written = event({"text": text}).decode()
    assert written.splitlines() == [written[:-2], ""]
    assert json.loads(written.removeprefix("data: ")) == {"text": text}


async def slow_events(gaps):
    for number, gap in enumerate(gaps):
        await asyncio.sleep(gap)
        yield b"%d" % number


def test_silence_is_filled_with_comments():
    async def main():
        return [chunk async for chunk in with_comments(slow_events([0, 0.25, 0]), 0.1)]

    assert asyncio.run(main()) == [b"0", KEEP_ALIVE, KEEP_ALIVE, b"1", b"2"]


def test_a_stream_with_comments_that_is_left_stops_its_events():
    stopped = []

    async def events():
        try:
            await asyncio.sleep(60)
            yield b""
        finally:
            stopped.append(True)

    async def main():
        source = events()
        async with aclosing(source), aclosing(with_comments(source, 0.05)) as chunks:
            assert await anext(chunks) == KEEP_ALIVE
        return stopped

    assert asyncio.run(main()) == [True]


def test_a_stream_begins_before_its_first_token_when_proxies_want_to_hear_something():
    async def test(served: Serving):
        real, served.core.step = served.core.step, lambda: []
        answer = asyncio.ensure_future(served.chat(max_tokens=3, stream=True))
        await asyncio.sleep(0.35)
        served.core.step = real
        return await answer

    response = run(test, sse_keep_alive_interval=0.1)
    lines = [line for line in response.text.split("\n\n") if line]
    assert ": keep-alive" in lines
    assert lines[-1] == "data: [DONE]"
    assert sum(line.startswith("data: {") for line in lines) >= 2
    assert '"role":"assistant"' in lines[0]
    assert run(lambda served: served.chat(max_tokens=3, stream=True)).text.count("keep-alive") == 0
