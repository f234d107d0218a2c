import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paxserve.tracing import parent_of
from tests.paxserve.serving import Serving, run

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(BaseHTTPRequestHandler):
    """An OpenTelemetry collector that keeps what it gets."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def collecting():
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def spans_of(received) -> list[dict]:
    return [
        span
        for _, _, body in received
        for resource in body["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def value_of(span: dict, key: str):
    (value,) = next(entry["value"] for entry in span["attributes"] if entry["key"] == key).values()
    return value


def test_a_request_is_a_span_with_its_phases_in_the_clients_trace():
    async def test(served: Serving):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "Hello", "max_tokens": 5, "stream": True}
        await served.http.post("/v1/completions", json=body, headers=headers)
        await served.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{'1' * 32}-{PARENT}-00"})
        await served.chat(max_tokens=2)

    with collecting() as collector:
        run(test, otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}")
        received = collector.received
    assert {entry[:2] for entry in received} == {("/v1/traces", "application/json")}
    spans = spans_of(received)
    first = [span for span in spans if span["traceId"] == TRACE]
    assert sorted(span["name"] for span in first) == ["decode", "llm_request", "prefill", "queue"]
    (root,) = [span for span in first if span["name"] == "llm_request"]
    assert root["parentSpanId"] == PARENT
    assert value_of(root, "gen_ai.usage.prompt_tokens") == "1"
    assert value_of(root, "gen_ai.request.max_tokens") == "5"
    assert 0 < value_of(root, "gen_ai.latency.time_to_first_token") <= value_of(root, "gen_ai.latency.e2e")
    phases = {span["name"]: span for span in first if span is not root}
    assert all(span["parentSpanId"] == root["spanId"] for span in phases.values())
    assert phases["queue"]["startTimeUnixNano"] == root["startTimeUnixNano"]
    assert phases["queue"]["endTimeUnixNano"] == phases["prefill"]["startTimeUnixNano"]
    assert phases["decode"]["endTimeUnixNano"] == root["endTimeUnixNano"]
    # The trace that is not sampled is left out, the chat has one of its own.
    others = {span["traceId"] for span in spans} - {TRACE}
    assert len(others) == 1
    assert "1" * 32 not in others
    assert "parentSpanId" not in next(s for s in spans if s["name"] == "llm_request" and s["traceId"] in others)


def test_a_collector_that_is_not_there_disturbs_nobody(caplog):
    async def test(served: Serving):
        return await served.complete(max_tokens=3)

    assert run(test, otlp_traces_endpoint="http://127.0.0.1:9").status_code == 200
    assert "could not be sent" in caplog.text


@pytest.mark.parametrize(
    "header",
    [None, "", "x", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01", "00-1-2-3"],
)
def test_headers_that_name_no_trace_begin_one(header):
    parent = parent_of(header)
    assert len(parent.trace_id) == 32
    assert parent.trace_id != TRACE
    assert parent.span_id is None
    assert parent.is_sampled
