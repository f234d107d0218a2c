"""The real scheduler and page pool on a device that only takes time: `StepTimes` says how much.

The loop is the engine core's: a step is planned while the one before it runs, so that a request which arrives
meanwhile joins the step after next.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paxserve.bench.report import statistics
from paxserve.bench.step_times import StepTimes
from paxserve.bench.trace import TraceRequest, at_rate
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.request import Request, expand_choices
from paxserve.engine.step_plan import RowResult, ScheduledStep
from paxserve.errors import ConfigError
from paxserve.messages import EngineOutput, EngineRequest, EngineStats
from paxserve.sampling_params import SamplingParams

DEPTH = 2
"""Steps that may be on their way, as in the engine."""

SAMPLE_STEPS = 16
"""How many steps lie between two looks at the memory."""

OUTPUT_TOKEN = 7
PERCENTILES = (50, 90, 99)
RATE_PRECISION = 1.03
"""Factor at which the search for a sustainable rate stops."""


class AnyScheduler(Protocol):
    """What a simulation needs of a scheduler."""

    def add(self, choices: list[Request]) -> None:
        """Queue a request."""
        ...

    def schedule(self) -> ScheduledStep | DecodeStep | None:
        """Plan a step."""
        ...

    def update(self, step: Any, results: Any) -> Iterable[EngineOutput]:
        """Take in a step."""
        ...

    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        ...

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        ...


@dataclass(slots=True)
class _Progress:
    source: TraceRequest
    first: float = 0.0
    last: float = 0.0


@dataclass
class _Memory:
    """Samples of how full and how empty the pool was."""

    waste: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def look(self, stats: EngineStats, page_size: int) -> None:
        """Take one sample."""
        if stats.num_pages_in_use:
            self.waste.append(stats.wasted_tokens / (stats.num_pages_in_use * page_size))
        self.usage.append(stats.num_pages_in_use / stats.num_pages)
        self.running.append(stats.num_running)


class Simulation:
    """One run of a trace through a scheduler."""

    def __init__(self, scheduler: AnyScheduler, times: StepTimes, *, page_size: int, host_seconds: float = 0.0) -> None:
        """`host_seconds` is what a program costs the host, during which the device may run those before it."""
        self.scheduler, self.times, self.page_size = scheduler, times, page_size
        self.host_seconds = host_seconds
        self.now = 0.0
        self._device_free = 0.0
        self._launched: deque[tuple[ScheduledStep | DecodeStep, float]] = deque()
        self._open: dict[str, _Progress] = {}
        self._done: list[_Progress] = []
        self._gaps: Counter[float] = Counter()
        """Between two times at which a request heard of tokens, however many."""
        self._memory = _Memory()
        self._num_steps = 0
        self._params: dict[int, SamplingParams] = {}
        self._result = RowResult(OUTPUT_TOKEN)
        self._prefixes: dict[str | None, int] = {}

    def run(self, trace: list[TraceRequest]) -> dict[str, Any]:
        """Serve the trace to its end; returns the figures, times in milliseconds where their name says so."""
        arrivals = deque(enumerate(trace))
        while arrivals or self._launched or self.scheduler.has_unfinished():
            if not self._launched and not self.scheduler.has_unfinished():
                self.now = max(self.now, arrivals[0][1].arrival)
            while arrivals and arrivals[0][1].arrival <= self.now:
                self._add(*arrivals.popleft())
            self._step()
        return self._figures()

    def _add(self, number: int, source: TraceRequest) -> None:
        params = self._params.get(source.output_len)
        if params is None:
            params = SamplingParams(max_tokens=source.output_len, temperature=0.0, ignore_eos=True)
            self._params[source.output_len] = params
        # Token values do not matter, only which are equal: the prefix's are its own, the rest the request's.
        shared = self._prefixes.setdefault(source.prefix, len(self._prefixes))
        tokens = [shared] * source.prefix_len + [-1 - number] * (source.prompt_len - source.prefix_len)
        request_id = str(number)
        request = EngineRequest(
            request_id=request_id, prompt_token_ids=tokens, params=params, arrival_time=source.arrival
        )
        self._open[request_id] = _Progress(source)
        self.scheduler.add(expand_choices(request, [0], number))

    def _step(self) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            seconds = self.times.seconds(scheduled, getattr(self.scheduler, "num_idle_rows", 0))
            self.now += self.host_seconds
            self._device_free = max(self.now, self._device_free) + seconds
            self._launched.append((scheduled, self._device_free))
            self._num_steps += 1
            if self._num_steps % SAMPLE_STEPS == 0:
                self._memory.look(self.scheduler.stats(), self.page_size)
        if self._launched and (scheduled is None or len(self._launched) >= DEPTH):
            step, end = self._launched.popleft()
            self.now = max(self.now, end)
            is_plain = isinstance(step, DecodeStep)
            shape = step.count, step.num_rows
            results = np.full(shape, OUTPUT_TOKEN) if is_plain else [self._result] * step.num_rows
            self._hear(self.scheduler.update(step, results))

    def _hear(self, outputs: Iterable[EngineOutput]) -> None:
        now, gaps = self.now, []
        for output in outputs:
            progress = self._open[output.request_id]
            if progress.last:
                gaps.append(now - progress.last)
            else:
                progress.first = now
            progress.last = now
            if output.finish_reason is not None:
                self._done.append(self._open.pop(output.request_id))
        self._gaps.update(gaps)

    def _figures(self) -> dict[str, Any]:
        done, stats = self._done, self.scheduler.stats()
        if not done:
            raise ConfigError("The trace has no request.")
        duration = max(p.last for p in done)
        num_output = sum(p.source.output_len for p in done)
        latencies = [p.last - p.source.arrival for p in done]
        per_token = [latency / p.source.output_len for latency, p in zip(latencies, done, strict=True)]
        return {
            "num_requests": len(done),
            "duration_s": duration,
            "request_throughput": len(done) / duration,
            "output_throughput": num_output / duration,
            "mean_prompt_len": float(np.mean([p.source.prompt_len for p in done])),
            "mean_output_len": num_output / len(done),
            "mean_normalised_latency_ms": 1000 * float(np.mean(per_token)),
            **statistics("ttft", [p.first - p.source.arrival for p in done]),
            **statistics(
                "tpot", [(p.last - p.first) / (p.source.output_len - 1) for p in done if p.source.output_len > 1]
            ),
            **_weighted_percentiles("itl", self._gaps),
            **statistics("e2el", latencies),
            "num_steps": self._num_steps,
            "num_preemptions": stats.num_preemptions,
            "prefix_hit_rate": stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
            "mean_waste": float(np.mean(self._memory.waste or [0.0])),
            "mean_usage": float(np.mean(self._memory.usage or [0.0])),
            "mean_running": float(np.mean(self._memory.running or [0])),
        }


def _weighted_percentiles(name: str, gaps: Counter[float]) -> dict[str, float | None]:
    """Percentiles in milliseconds of values that came so many times each."""
    if not gaps:
        return dict.fromkeys((*(f"p{p}_{name}_ms" for p in PERCENTILES), f"max_{name}_ms"))
    values = np.array(sorted(gaps))
    ends = np.cumsum([gaps[value] for value in values.tolist()])
    places = np.searchsorted(ends, np.array(PERCENTILES) / 100 * ends[-1])
    found: dict[str, float | None] = {f"max_{name}_ms": 1000 * float(values[-1])}
    for p, place in zip(PERCENTILES, places, strict=True):
        found[f"p{p}_{name}_ms"] = 1000 * float(values[place])
    return found


def sustainable_rate(
    make: Callable[[], Simulation], unit_trace: list[TraceRequest], latency_ms: float, highest: float = 1e4
) -> float:
    """The highest rate at which the mean normalised latency stays within `latency_ms` a token.

    `unit_trace` arrives at one request a second. The answer is exact to 3 %; 0 if no rate is low enough.
    """

    def is_fast(rate: float) -> bool:
        figures = make().run(at_rate(unit_trace, rate))
        return figures["mean_normalised_latency_ms"] <= latency_ms

    low = high = 0.01
    if not is_fast(low):
        return 0.0
    while high < highest:
        high = low * 4
        if not is_fast(high):
            break
        low = high
    while high / low > RATE_PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_fast(middle) else (low, middle)
    return low
