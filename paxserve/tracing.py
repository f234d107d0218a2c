"""Traces of requests for an OpenTelemetry collector: one span a request, with its time in queue, prefill and decode.

Spans go out as OTLP over HTTP with JSON bodies (https://opentelemetry.io/docs/specs/otlp/#otlphttp), from a thread of
their own, and are dropped rather than piled up when the collector does not keep pace.
"""

import json
import logging
import os
import queue
import re
import threading
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from paxserve import __version__
from paxserve.messages import EngineRequest
from paxserve.outputs import RequestOutput

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000
"""Spans that wait for the collector."""

MAX_BATCH = 512
FLUSH_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""https://www.w3.org/TR/trace-context/: trace, parent span, flags (bit 0: sampled)."""

SERVER, INTERNAL = 2, 1


class Parent(NamedTuple):
    """Where in a trace a request belongs."""

    trace_id: str
    span_id: str | None
    is_sampled: bool = True


def parent_of(traceparent: str | None) -> Parent:
    """The place that a `traceparent` header names; a new trace without one, or with one that is wrong."""
    match = TRACEPARENT.fullmatch(traceparent or "")
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return Parent(os.urandom(16).hex(), None)
    return Parent(match[1], match[2], bool(int(match[3], 16) & 1))


def attribute(key: str, value: str | int | float) -> dict[str, Any]:
    """An attribute in OTLP's JSON."""
    if isinstance(value, str):
        return {"key": key, "value": {"stringValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    return {"key": key, "value": {"doubleValue": value}}


def span(
    name: str, trace_id: str, span_id: str, parent_id: str | None, kind: int, times: tuple[float, float], **more: Any
) -> dict[str, Any]:
    """A span in OTLP's JSON; times are seconds of `time.time()`."""
    start, end = (str(int(seconds * 1e9)) for seconds in times)
    return {
        "traceId": trace_id, "spanId": span_id, **({"parentSpanId": parent_id} if parent_id else {}),
        "name": name, "kind": kind, "startTimeUnixNano": start, "endTimeUnixNano": end, **more,
    }  # fmt: skip


class Tracer:
    """Follows requests from `begin` to `end` and tells the collector of them."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        self._url = endpoint if endpoint.rstrip("/").endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
        self._model_name = model_name
        self._requests: dict[str, tuple[EngineRequest, Parent]] = {}
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, request: EngineRequest, traceparent: str | None) -> None:
        """A request has been given to the engine."""
        parent = parent_of(traceparent)
        if parent.is_sampled:
            self._requests[request.request_id] = (request, parent)

    def end(self, output: RequestOutput) -> None:
        """A request has ended, all choices of it."""
        known = self._requests.pop(output.request_id, None)
        if known is None or output.metrics is None or output.metrics.finished_time is None:
            return
        try:
            for made in self._spans(*known, output):
                self._queue.put_nowait(made)
        except queue.Full:
            pass

    def close(self) -> None:
        """Send what is left."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(2 * TIMEOUT_SECONDS)

    def _spans(self, request: EngineRequest, parent: Parent, output: RequestOutput) -> list[dict[str, Any]]:
        times = output.metrics
        assert times is not None
        assert times.finished_time is not None
        root = os.urandom(8).hex()
        attributes = [
            attribute("gen_ai.request.id", output.request_id),
            attribute("gen_ai.response.model", self._model_name),
            attribute("gen_ai.request.n", request.params.n),
            attribute("gen_ai.request.temperature", float(request.params.temperature)),
            attribute("gen_ai.request.top_p", float(request.params.top_p)),
            attribute("gen_ai.request.max_tokens", request.params.max_tokens or 0),
            attribute("gen_ai.usage.prompt_tokens", len(request.prompt_token_ids)),
            attribute("gen_ai.latency.e2e", times.finished_time - times.arrival_time),
        ]
        steps = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time]
        children = []
        for name, start, end in zip(("queue", "prefill", "decode"), steps, steps[1:], strict=False):
            if start is None or end is None:
                continue
            period = (start, max(start, end))
            children.append(span(name, parent.trace_id, os.urandom(8).hex(), root, INTERNAL, period))
        if times.first_token_time is not None:
            first = times.first_token_time - times.arrival_time
            attributes.append(attribute("gen_ai.latency.time_to_first_token", first))
        whole = (times.arrival_time, times.finished_time)
        top = span("llm_request", parent.trace_id, root, parent.span_id, SERVER, whole, attributes=attributes)
        return [top, *children]

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch: list[dict[str, Any]] = []
            entry = self._queue.get()
            while entry is not None:
                batch.append(entry)
                if len(batch) >= MAX_BATCH:
                    break
                try:
                    entry = self._queue.get(timeout=FLUSH_SECONDS)
                except queue.Empty:
                    break
            is_open = entry is not None
            if batch:
                self._send(batch)

    def _send(self, spans: list[dict[str, Any]]) -> None:
        resource = {"attributes": [attribute("service.name", "paxserve"), attribute("service.version", __version__)]}
        scope = {"scope": {"name": "paxserve"}, "spans": spans}
        body = json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
                pass
        except (urllib.error.URLError, OSError) as error:
            logger.warning("%d spans could not be sent to %s: %s", len(spans), self._url, error)
