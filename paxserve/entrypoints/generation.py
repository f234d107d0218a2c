"""The life of a generating request on the server, common to completions and chats: check, run, stream or collect."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from fastapi import Request
from msgspec import UNSET
from starlette.responses import Response

from paxserve.engine.output_processor import OutputKind
from paxserve.engine.request_stream import RequestStream
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.errors import ErrorBody, body_of
from paxserve.entrypoints.protocol.generation import PromptTokensDetails, SamplingFields, StreamUsage, Usage
from paxserve.entrypoints.sse import DONE, EventStream, event, until_disconnect
from paxserve.messages import EngineRequest
from paxserve.outputs import RequestOutput

LOAD_HEADER = "endpoint-load-metrics"

Batch = list[tuple[int, RequestOutput]]


class Writer(Protocol):
    """Writes the answer of one endpoint."""

    end: bytes
    """What ends a stream that went well."""

    def open(self) -> bytes:
        """The first events of the stream."""
        ...

    def write(self, batch: Batch) -> bytes:
        """The events for what has come."""
        ...

    def finish(self) -> bytes:
        """The last events before the end mark."""
        ...

    def fail(self, body: ErrorBody) -> bytes:
        """The last events of a stream that failed."""
        ...

    def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        """The whole answer at once."""
        ...


async def answer(
    request: Request,
    context: ServingContext,
    requests: Sequence[EngineRequest],
    prompts: Sequence[str | None],
    writer: Writer,
    options: SamplingFields,
) -> Response:
    """Run the requests and answer; a client that leaves aborts them.

    A stream begins when the first output is there: until then a refusal still gets its real status.
    """
    is_stream, keep_alive = bool(options.stream), context.server_config.sse_keep_alive_interval
    kind = OutputKind.DELTA if is_stream else OutputKind.FINAL_ONLY
    stream = context.engine.submit(
        requests, kind, prompts, interval=options.stream_interval or 1, traceparent=request.headers.get("traceparent")
    )
    try:
        if not is_stream:
            response = writer.respond(await until_disconnect(request, collect(stream, len(requests))))
            response.headers.update(load_headers(request, context))
            return response
        # When proxies want to hear something, they do so even if the first token takes its time.
        await until_disconnect(request, asyncio.wait_for(stream.wait_first(), keep_alive or None))
    except TimeoutError:
        pass
    except BaseException:
        stream.close()
        raise
    return EventStream(with_end(events(stream, writer), writer), on_close=stream.close, keep_alive=keep_alive)


def load_headers(request: Request, context: ServingContext) -> dict[str, str]:
    """How busy the engine is, for load balancers that ask for it with `endpoint-load-metrics-format`."""
    form = request.headers.get("endpoint-load-metrics-format", "").upper()
    stats = context.engine.stats
    values = {
        "kv_cache_usage_perc": stats.num_pages_in_use / max(1, stats.num_pages),
        "num_requests_waiting": float(stats.num_waiting),
    }
    if form == "JSON":
        return {LOAD_HEADER: f"JSON {json.dumps({'named_metrics': values})}"}
    if form == "TEXT":
        return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())}
    return {}


async def collect(stream: RequestStream, num_requests: int) -> list[RequestOutput]:
    """The final output of every request, in order."""
    outputs: dict[int, RequestOutput] = {}
    async for batch in stream:
        outputs.update(batch)
    return [outputs[position] for position in range(num_requests)]


async def events(stream: RequestStream, writer: Writer) -> AsyncGenerator[bytes, None]:
    """The events of a stream that goes well."""
    yield writer.open()
    async for batch in stream:
        if chunk := writer.write(batch):
            yield chunk
    yield writer.finish()


async def with_end(chunks: AsyncGenerator[bytes, None], writer: Writer) -> AsyncGenerator[bytes, None]:
    """The events and the end mark; an error becomes the last event, for the status has been sent long ago."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk:
                    yield chunk
    except Exception as error:
        yield writer.fail(body_of(error))
        return
    if writer.end:
        yield writer.end


class OpenAIWriter:
    """The end of streams as OpenAI has it."""

    end = DONE

    def fail(self, body: ErrorBody) -> bytes:
        """The error as an event, and the end mark."""
        return event(body) + DONE


class TokenCount:
    """Counts the tokens of an answer while it is streamed."""

    def __init__(self, requests: Sequence[EngineRequest], *, has_details: bool = True) -> None:
        self.has_details = has_details
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return sum(self._cached.values())

    def add(self, position: int, output: RequestOutput) -> None:
        """Count a delta."""
        self._cached[position] = output.num_cached_tokens
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)

    def stream_usage(self) -> StreamUsage:
        """The usage so far, for a chunk."""
        total = self.prompt_tokens + self.completion_tokens
        details = PromptTokensDetails(self.cached_tokens) if self.has_details else UNSET
        return StreamUsage(self.prompt_tokens, total, self.completion_tokens, details)

    def usage(self) -> Usage:
        """The usage, for a whole answer."""
        total = self.prompt_tokens + self.completion_tokens
        details = PromptTokensDetails(self.cached_tokens) if self.has_details else None
        return Usage(self.prompt_tokens, total, self.completion_tokens, details)
