"""One streamed request to an OpenAI-compatible server, timed chunk by chunk."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from paxserve.bench.datasets import BenchRequest
from paxserve.client import LineSplitter, error_message, error_text, parse_event


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how requests are sent."""

    root: str
    model: str
    endpoint: str = "/v1/completions"
    """`/v1/completions`, or `/v1/chat/completions` for prompts that are text."""
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    """More fields for every body."""

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens, "temperature": 0.0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        return body | self.extra_body


@dataclass(slots=True, kw_only=True)
class Record:
    """What one request saw; times in seconds, `start` by `time.perf_counter()`."""

    prompt_len: int
    start: float = 0.0
    ttft: float | None = None
    """Time to the first chunk that carries a choice."""
    itls: list[float] = field(default_factory=list)
    """Times between such chunks."""
    latency: float = 0.0
    """Time to the last such chunk."""
    output_len: int = 0
    error: str | None = None

    @property
    def is_success(self) -> bool:
        """Whether the answer came whole."""
        return self.error is None


async def send(session: httpx.AsyncClient, target: Target, request: BenchRequest) -> Record:
    """Send one request and read its whole stream; a failure is noted in the record, never raised."""
    record = Record(prompt_len=len(request.prompt) if isinstance(request.prompt, list) else 0)
    record.start = time.perf_counter()
    try:
        async with session.stream("POST", target.root + target.endpoint, json=target.body(request)) as response:
            if response.status_code != httpx.codes.OK:
                record.error = f"HTTP {response.status_code}: {error_text(await response.aread())}"
                return record
            await _read_stream(response, record)
    except (httpx.HTTPError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    if record.error is None and record.ttft is None:
        record.error = "The stream brought no token."
    return record


async def _read_stream(response: httpx.Response, record: Record) -> None:
    """Fill the record from the events of one stream, whose arrival is noted before they are parsed."""
    last, chunks, usage = record.start, 0, None
    async for now, line in _timed_lines(response):
        event = parse_event(line)
        if event is None:
            continue
        if event.get("error"):
            record.error = error_message(event)
            return
        usage = event.get("usage") or usage
        if not event.get("choices"):
            continue
        chunks += 1
        if record.ttft is None:
            record.ttft = now - record.start
        else:
            record.itls.append(now - last)
        last = now
    record.latency = last - record.start
    record.output_len = usage["completion_tokens"] if usage else chunks
    if usage:
        record.prompt_len = usage["prompt_tokens"]


async def _timed_lines(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """Each line with the time at which it was whole."""
    lines = LineSplitter()
    async for chunk in response.aiter_bytes():
        now = time.perf_counter()
        for line in lines.feed(chunk):
            yield now, line
