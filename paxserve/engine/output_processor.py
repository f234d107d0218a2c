"""Engine outputs to what callers read: text, log-probabilities, reasons, times. No I/O, no engine."""

import enum
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from paxserve.engine.detokenizer import IncrementalDetokenizer
from paxserve.engine.logprobs import LogprobReader
from paxserve.engine.token_table import token_table
from paxserve.errors import RequestError
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.messages import EngineOutput, EngineRequest
from paxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


class OutputKind(enum.Enum):
    """How much each `RequestOutput` of a request tells."""

    CUMULATIVE = enum.auto()
    """All choices, each with everything so far."""
    DELTA = enum.auto()
    """The choices that have news, each with only what is new."""
    FINAL_ONLY = enum.auto()
    """Nothing until every choice is complete."""


class ProcessedOutputs(NamedTuple):
    """What one step meant for the callers, and what the engine core must be told."""

    request_outputs: list[RequestOutput]
    aborts: list[tuple[str, int | None]]
    """(request id, choice) that a stop string ended; the choice is None when the whole request is over."""


class _Choice:
    """One output of a request as it grows; `new_*` is what the next DELTA will carry."""

    def __init__(self, index: int, request: EngineRequest, detokenizer: IncrementalDetokenizer | None) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self.cumulative_logprob: float | None = None if request.params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_told = 0
        self.has_news = False

    def is_due(self, interval: int) -> bool:
        """Whether a DELTA may tell of it: at its beginning, at its end, and every `interval` tokens."""
        is_enough = self.num_told == 0 or self.finish_reason is not None
        return self.has_news and (is_enough or len(self.token_ids) - self.num_told >= interval)

    def render(self, kind: OutputKind) -> CompletionOutput:
        """This choice for a caller; a DELTA leaves nothing to tell again."""
        if self.detokenizer is not None:
            self.pieces.append(self.detokenizer.take())
        text = "".join(self.pieces)
        start = self.num_told if kind is OutputKind.DELTA else 0
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self.pieces = [] if kind is OutputKind.DELTA else [text]
        self.num_told = len(self.token_ids)
        self.has_news = False
        return output


class _RequestState:
    """One request in flight: its choices, prompt log-probabilities and times."""

    def __init__(
        self,
        request: EngineRequest,
        prompt: str | None,
        kind: OutputKind,
        tokenizer: Tokenizer | None,
        interval: int,
    ) -> None:
        params = request.params
        self.interval = interval
        self.request, self.prompt, self.kind = request, prompt, kind
        table = token_table(tokenizer) if tokenizer is not None and params.detokenize else None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.choices: list[_Choice] = []
        self.readers: list[LogprobReader] = []
        self.prompt_reader = LogprobReader(table)
        for index in range(params.n):
            detokenizer = IncrementalDetokenizer(table, params, request.prompt_token_ids) if table else None
            self.choices.append(_Choice(index, request, detokenizer))
            self.readers.append(LogprobReader(table))
        self.num_open = params.n
        self.num_cached_tokens = 0
        self.preemptions = [0] * params.n
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)

    def take_in(self, output: EngineOutput, now: float) -> bool:
        """Add one step's news of one choice; whether a stop string has just ended that choice."""
        choice = self.choices[output.index]
        self._note_times(output, now)
        if output.prompt_logprobs is not None:
            self._read_prompt_logprobs(output)
        num_kept = len(output.new_token_ids)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        stop_string = None
        if (detokenizer := choice.detokenizer) is not None:
            is_hidden = finish_reason == "stop" and not self.request.params.include_stop_str_in_output
            num_kept = detokenizer.append(output.new_token_ids, is_last_hidden=is_hidden and num_kept > 0)
            stop_string = detokenizer.stop_string
            if stop_string is not None:
                finish_reason, stop_reason = "stop", stop_string
            elif finish_reason is not None:
                detokenizer.finish()
        choice.token_ids += output.new_token_ids[:num_kept]
        self._read_logprobs(choice, output, num_kept)
        if output.cumulative_logprob is not None:
            choice.cumulative_logprob = output.cumulative_logprob
        choice.has_news = True
        limit = self.request.params.repetition_detection
        if finish_reason is None and limit is not None and limit.is_reached(choice.token_ids):
            finish_reason = "repetition"
            if detokenizer is not None:
                detokenizer.finish()
        if finish_reason is not None:
            self._close(choice, finish_reason, stop_reason, now)
        return finish_reason is not None and output.finish_reason is None

    def end(self, reason: str, now: float) -> None:
        """Finish every choice that is still running."""
        for choice in self.choices:
            if choice.finish_reason is None:
                if choice.detokenizer is not None:
                    choice.detokenizer.finish()
                choice.has_news = True
                self._close(choice, reason, None, now)

    def is_due(self) -> bool:
        """Whether there is enough to tell a caller."""
        if self.kind is OutputKind.FINAL_ONLY:
            return self.num_open == 0
        return self.kind is OutputKind.CUMULATIVE or any(choice.is_due(self.interval) for choice in self.choices)

    def render(self) -> RequestOutput:
        """The request for a caller; in a DELTA only what is new."""
        is_delta = self.kind is OutputKind.DELTA
        choices = [choice for choice in self.choices if not is_delta or choice.is_due(self.interval)]
        output = RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[choice.render(self.kind) for choice in choices],
            finished=self.num_open == 0,
            num_cached_tokens=self.num_cached_tokens,
            metrics=replace(self.metrics),
        )
        if is_delta:
            self.prompt_logprobs = None
        return output

    def _close(self, choice: _Choice, finish_reason: str, stop_reason: int | str | None, now: float) -> None:
        choice.finish_reason, choice.stop_reason = finish_reason, stop_reason
        self.num_open -= 1
        if self.num_open == 0:
            self.metrics.finished_time = now

    def _note_times(self, output: EngineOutput, now: float) -> None:
        metrics = self.metrics
        if output.first_scheduled_time and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        if output.new_token_ids:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        if output.index == 0 and output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.num_preemptions:
            self.preemptions[output.index] = output.num_preemptions
            metrics.num_preemptions = sum(self.preemptions)

    def _read_prompt_logprobs(self, output: EngineOutput) -> None:
        self.prompt_logprobs = []
        for token_id, entry in zip(self.request.prompt_token_ids, output.prompt_logprobs or (), strict=True):
            if entry is None:
                self.prompt_reader.skip(token_id)
            self.prompt_logprobs.append(None if entry is None else self.prompt_reader.read(entry))

    def _read_logprobs(self, choice: _Choice, output: EngineOutput, num_kept: int) -> None:
        if choice.logprobs is None or choice.cumulative_logprob is None or not output.logprobs:
            return
        reader = self.readers[choice.index]
        for entry in output.logprobs[:num_kept]:
            choice.logprobs.append(reader.read(entry))
            choice.cumulative_logprob += entry.logprobs[0]


class OutputProcessor:
    """Every request in flight, from the front's side."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests that have not been answered in full."""
        return len(self._states)

    def add(
        self,
        request: EngineRequest,
        prompt: str | None = None,
        *,
        kind: OutputKind = OutputKind.CUMULATIVE,
        interval: int = 1,
    ) -> None:
        """Expect outputs of this request, a DELTA every `interval` tokens. Raises `RequestError` for an id in use."""
        if request.request_id in self._states:
            raise RequestError(f"request_id {request.request_id!r} is in use by a running request.", "request_id")
        self._states[request.request_id] = _RequestState(request, prompt, kind, self.tokenizer, interval)

    def process(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        """One `RequestOutput` for each request that has something to tell, and the choices to abort.

        Outputs of requests and choices that are over (they were on their way) are dropped.
        """
        now = time.time()
        touched: dict[str, _RequestState] = {}
        aborts: list[tuple[str, int | None]] = []
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None or state.choices[output.index].finish_reason is not None:
                continue
            touched[output.request_id] = state
            if state.take_in(output, now):
                aborts.append((output.request_id, output.index))
        results = []
        for request_id, state in touched.items():
            if state.num_open == 0:
                del self._states[request_id]
            if state.is_due():
                results.append(state.render())
        return ProcessedOutputs(results, list(dict.fromkeys(map(self._widen, aborts))))

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Forget these requests; what they had so far, with finish_reason "abort". Unknown ids are ignored."""
        now = time.time()
        results = []
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                state.end("abort", now)
                results.append(state.render())
        return results

    def request_ids(self) -> list[str]:
        """The requests in flight, oldest first."""
        return list(self._states)

    def _widen(self, abort: tuple[str, int | None]) -> tuple[str, int | None]:
        """The whole request instead of a choice, when no other choice of it is running."""
        request_id, _ = abort
        return abort if request_id in self._states else (request_id, None)
