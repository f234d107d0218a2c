"""The engine as the server sees it: many callers at once, one task that hands the core's outputs to them."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from paxserve.engine import wire
from paxserve.engine.admission import Admission
from paxserve.engine.core_client import LAST_WORDS_SECONDS, how_it_ended
from paxserve.engine.input_processor import InputProcessor, Prompt, prompt_text
from paxserve.engine.output_processor import OutputKind, OutputProcessor
from paxserve.engine.pooled_requests import Pooled, PooledRequests
from paxserve.engine.request_stream import RequestStream
from paxserve.errors import EngineDeadError, RequestError
from paxserve.messages import EngineRequest, EngineStats
from paxserve.metrics import Metrics
from paxserve.outputs import RequestOutput
from paxserve.sampling_params import SamplingParams
from paxserve.tracing import Tracer

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_SECONDS = 0.01
"""How often a pause looks whether the last request has ended."""

INLINE_CHARACTERS = 4096
"""Texts up to this are handled on the event loop (under a millisecond); longer ones would hold up every stream."""


class Client(Protocol):
    """What the engine needs of a `CoreClient`."""

    def add_request(self, request: EngineRequest) -> None:
        """Give the core a request."""
        ...

    def abort_requests(self, keys: list[tuple[str, int | None]]) -> None:
        """Stop requests, or single choices of them."""
        ...

    async def call(self, method: str) -> Any:
        """The result of a method of the core."""
        ...

    def resolve_call(self, reply: wire.Reply) -> None:
        """Hand a reply to its caller."""
        ...

    def fail_calls(self, error: EngineDeadError) -> None:
        """End every waiting call."""
        ...

    async def receive(self) -> wire.FromCore:
        """The next message."""
        ...

    async def wait_exit(self) -> int:
        """The exit status of the core, once it has ended."""
        ...


class AsyncEngine:
    """Submits requests to an engine core in another process and streams what it makes of them."""

    def __init__(
        self,
        client: Client,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        metrics: Metrics,
        on_death: Callable[[EngineDeadError], None] | None = None,
        admission: Admission | None = None,
        tracer: Tracer | None = None,
        front: int = 0,
    ) -> None:
        self.tracer = tracer
        self.admission = admission or Admission()
        self.client = client
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.metrics = metrics
        self.on_death = on_death
        self.dead_error: EngineDeadError | None = None
        self.stats = EngineStats()
        self._unique = (f"{number}.{front}" for number in itertools.count())
        """What sets the requests of one answer apart from those of any other, at this front or another one: clients
        may name their answers, and two with one name must not get into each other's way."""
        self._streams: dict[str, RequestStream] = {}
        self._pooled = PooledRequests()
        self._tasks: list[asyncio.Task[None]] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def start(self) -> None:
        """Begin to handle outputs; needs a running event loop."""
        self._tasks = [asyncio.ensure_future(self._handle_outputs()), asyncio.ensure_future(self._watch_core())]

    async def stop(self) -> None:
        """End the tasks; requests that still run end with an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(EngineDeadError("The server is shutting down."))
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    @property
    def num_unfinished(self) -> int:
        """Requests that somebody still waits for."""
        return len(self._streams) + len(self._pooled)

    async def in_worker(self, work: Callable[[], T], size: int) -> T:
        """The result of text work, in a thread of its own if the text has many characters."""
        if size <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams, **options: Any) -> EngineRequest:
        """The checked and tokenized request. Raises `RequestError` for whatever is wrong with it."""
        return (await self._prepare_all([request_id], [prompt], params, **options))[0]

    async def prepare_all(
        self, answer_id: str, prompts: Sequence[Prompt], params: SamplingParams, **options: Any
    ) -> list[EngineRequest]:
        """The requests of one answer, all of them checked before any is run."""
        unique = next(self._unique)
        request_ids = [f"{answer_id}-{unique}-{position}" for position in range(len(prompts))]
        return await self._prepare_all(request_ids, prompts, params, **options)

    async def _prepare_all(
        self, request_ids: Sequence[str], prompts: Sequence[Prompt], params: SamplingParams, **options: Any
    ) -> list[EngineRequest]:
        self.check_alive()
        size = sum(len(prompt_text(prompt) or "") for prompt in prompts)
        process, named = self.input_processor.process, list(zip(request_ids, prompts, strict=True))
        options.setdefault("arrival_time", time.time())
        await self.admission.wait()
        return await self.in_worker(lambda: [process(name, prompt, params, **options) for name, prompt in named], size)

    def submit(
        self,
        requests: Sequence[EngineRequest],
        kind: OutputKind,
        prompts: Sequence[str | None] | None = None,
        *,
        interval: int = 1,
        traceparent: str | None = None,
    ) -> RequestStream:
        """Start requests together; the stream must be read to its end or closed. Deltas have `interval` tokens."""
        self.check_alive()
        self.admission.admit(requests)
        stream = RequestStream(
            [request.request_id for request in requests], is_delta=kind is OutputKind.DELTA, abort=self._abort
        )
        added: list[str] = []
        try:
            for request, prompt in zip(requests, prompts or [None] * len(requests), strict=True):
                self.output_processor.add(request, prompt, kind=kind, interval=interval)
                added.append(request.request_id)
        except RequestError:
            self.output_processor.abort(added)
            self._release(request.request_id for request in requests)
            raise
        try:
            for request in requests:
                self._streams[request.request_id] = stream
                self.metrics.requests.begin(request)
                if self.tracer is not None:
                    self.tracer.begin(request, traceparent)
                self.client.add_request(request)
        except BaseException:
            stream.close()  # all of them or none: what was sent already is aborted
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        kind: OutputKind = OutputKind.CUMULATIVE,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; leaving the loop early aborts it."""
        request = await self.prepare(request_id, prompt, params, **options)
        stream = self.submit([request], kind, [prompt_text(prompt)])
        try:
            async for batch in stream:
                for _, output in batch:
                    yield output
        finally:
            stream.close()

    def end(self, answer_ids: Sequence[str] | None = None) -> int:
        """End answers by the ids that clients know, or all of them, with finish_reason "abort"; how many requests.

        Pooling requests, which have nothing to show by then, end with an error instead.
        """
        num_pooled = len(self._pooled) if answer_ids is None else 0
        if num_pooled:
            self._pooled.fail(RequestError("The request was ended by the server.", code=503))
        ended = [
            request_id
            for request_id in self._streams
            if answer_ids is None or request_id.rsplit("-", 2)[0] in answer_ids
        ]
        streams = {request_id: self._streams[request_id] for request_id in ended}
        self._release(ended)
        for output in self.output_processor.abort(ended):
            self._deliver(output)
        if streams and self.dead_error is None:
            self.client.abort_requests([(request_id, None) for request_id in streams])
        return len(ended) + num_pooled

    async def quiet(self, is_end: bool) -> None:
        """End the requests in flight, or wait for them; return when the core has heard of it."""
        if is_end:
            self.end()
        while self.num_unfinished:
            await asyncio.sleep(QUIET_SECONDS)
        await self.call("stats")

    async def pool(self, requests: Sequence[EngineRequest]) -> list[Pooled]:
        """The answers to pooling requests, in order; if the caller gives up, those still running are aborted."""
        await self.admission.wait()
        self.check_alive()
        unique = next(self._unique)
        for position, request in enumerate(requests):
            request.request_id = f"{request.request_id}-{unique}-{position}"
        self.admission.admit(requests)
        answers = []
        try:
            for request in requests:
                answers.append(self._pooled.expect(request))
                self.metrics.requests.begin(request)
                self.client.add_request(request)
            return [await answer for answer in answers]
        finally:
            self._release(request.request_id for request in requests)
            if left := self._pooled.forget(requests):
                for request_id in left:
                    self.metrics.record_finish("abort")
                    self.metrics.requests.forget(request_id)
                if self.dead_error is None:
                    self.client.abort_requests([(request_id, None) for request_id in left])

    async def call(self, method: str) -> Any:
        """The result of a method of the core (`stats`, `reset_prefix_cache`)."""
        self.check_alive()
        return await self.client.call(method)

    def check_alive(self) -> None:
        """Raise the `EngineDeadError` that tells why the core is gone, if it is."""
        if self.dead_error is not None:
            raise self.dead_error

    async def _handle_outputs(self) -> None:
        while True:
            message = await self.client.receive()
            try:
                self._handle(message)
            except Exception as error:
                logger.exception("The front failed to handle what the engine core sent")
                self._die(EngineDeadError(f"The front process failed: {type(error).__name__}: {error}"))
                return
            # When the core is faster than this process its messages never run out: let the readers have their turn.
            await asyncio.sleep(0)

    def _handle(self, message: wire.FromCore) -> None:
        match message:
            case wire.Outputs(listed, stats, decoded):
                outputs = [*listed, *(decoded or ())]
                self.stats = stats
                self.metrics.engine.stats = stats
                self.metrics.requests.record(outputs)
                self._release(output.request_id for output in outputs)
                for answer in self._pooled.take(outputs):
                    self.metrics.record_finish("stop")
                    self.metrics.requests.end(answer)
                processed = self.output_processor.process(outputs)
                for output in processed.request_outputs:
                    self._deliver(output)
                if processed.aborts:
                    self.client.abort_requests(processed.aborts)
            case wire.Refused():
                self._refuse(message)
            case wire.Reply():
                self.client.resolve_call(message)
            case wire.Died(reason):
                self._die(EngineDeadError(f"The engine core died: {reason}"))

    def _deliver(self, output: RequestOutput) -> None:
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self.metrics.record_finish(choice.finish_reason)
        stream = self._streams.get(output.request_id)
        if output.finished:
            self._streams.pop(output.request_id, None)
            self._record_end(output)
        if stream is not None:
            stream.put(output)

    def _record_end(self, output: RequestOutput) -> None:
        self.metrics.requests.end(output)
        if self.tracer is not None:
            self.tracer.end(output)

    def _refuse(self, refusal: wire.Refused) -> None:
        error = RequestError(refusal.message, refusal.param, refusal.code)
        stream = self._streams.get(refusal.request_id)
        if stream is None:
            self._pooled.fail(error, [refusal.request_id])
            return
        stream.close()
        stream.fail(error)

    def _release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.admission.release(request_id)

    def _abort(self, request_ids: list[str]) -> None:
        self._release(request_ids)
        for output in self.output_processor.abort(request_ids):
            self._streams.pop(output.request_id, None)
            for choice in output.outputs:
                self.metrics.record_finish(choice.finish_reason or "abort")
            self._record_end(output)
        if self.dead_error is None:
            self.client.abort_requests([(request_id, None) for request_id in request_ids])

    async def _watch_core(self) -> None:
        exit_code = await self.client.wait_exit()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self._die(EngineDeadError(f"The engine core {how_it_ended(exit_code)}."))

    def _die(self, error: EngineDeadError) -> None:
        if self.dead_error is not None:
            return
        self.dead_error = error
        logger.error("%s %d requests in flight get an error.", error, self.num_unfinished)
        self._fail_all(error)
        self.metrics.engine.record_death()
        if self.on_death is not None:
            self.on_death(error)

    def _fail_all(self, error: EngineDeadError) -> None:
        self._release(self._streams)
        self.client.fail_calls(error)
        self._pooled.fail(error)
        self.output_processor.abort(list(self._streams))
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
