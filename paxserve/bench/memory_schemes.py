"""The ways of keeping a request's keys and values that a simulation compares, on one device with one set of limits."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from paxserve.bench.contiguous import ContiguousScheduler
from paxserve.bench.simulator import Simulation, sustainable_rate
from paxserve.bench.step_times import StepTimes
from paxserve.bench.trace import TraceRequest
from paxserve.config import SchedulerConfig
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.scheduler import Scheduler
from paxserve.errors import ConfigError

Scheme = Literal["paged", "oracle", "longest", "static"]

SCHEMES: tuple[Scheme, ...] = ("paged", "oracle", "longest", "static")
"""Pages; contiguous memory of the true length (Orca-Oracle); of the longest (Orca-Max); and that in static batches."""

LATENCY_FACTOR = 3.0
"""Times the latency of a request alone that count as acceptable where nothing else is said."""

NUM_ALONE = 50
"""Requests that are run one at a time to learn what a request alone takes."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A device and its limits."""

    times: StepTimes
    config: SchedulerConfig
    kv_tokens: int
    page_size: int
    max_model_len: int
    host_seconds: float = 0.0
    """What a step, or a program of several, costs the host."""

    def check(self, trace: list[TraceRequest]) -> None:
        """Raise `ConfigError` if some request can never run."""
        most = min(self.max_model_len, self.kv_tokens // self.page_size * self.page_size)
        longest = max(request.prompt_len + request.output_len for request in trace)
        if longest > most:
            raise ConfigError(f"The trace has a request of {longest} tokens, but a sequence may have {most}.")

    def simulation(self, scheme: Scheme) -> Simulation:
        """A fresh simulation of the device under one scheme."""
        if scheme == "paged":
            pool = PagePool(self.kv_tokens // self.page_size, self.page_size)
            scheduler = Scheduler.for_config(self.config, pool, self.max_model_len)
            return Simulation(scheduler, self.times, page_size=self.page_size, host_seconds=self.host_seconds)
        max_num_seqs, max_num_batched_tokens = self.config.limits
        scheduler = ContiguousScheduler(
            self.kv_tokens,
            reservation="exact" if scheme == "oracle" else "longest",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            is_static=scheme == "static",
        )
        return Simulation(scheduler, self.times, page_size=1, host_seconds=self.host_seconds)

    def compare(self, unit_trace: list[TraceRequest], latency_ms: float | None = None) -> dict[str, Any]:
        """The rate that each scheme sustains at an equal latency, and how many times as much pages sustain.

        `unit_trace` arrives at one request a second; requests wait for each other only in so far as rates make them.
        """
        limit = self._lone_latency_ms(unit_trace) * LATENCY_FACTOR if latency_ms is None else latency_ms
        rates = {
            scheme: sustainable_rate(lambda scheme=scheme: self.simulation(scheme), unit_trace, limit)
            for scheme in SCHEMES
        }
        ratios = {scheme: rates["paged"] / rate if rate else None for scheme, rate in rates.items()}
        return {"latency_ms": limit, "sustainable_rate": rates, "paged_over": ratios}

    def _lone_latency_ms(self, trace: list[TraceRequest]) -> float:
        """Mean milliseconds a token of requests that run one at a time."""
        alone = [replace(request, arrival=1e6 * number) for number, request in enumerate(trace[:NUM_ALONE])]
        return self.simulation("paged").run(alone)["mean_normalised_latency_ms"]
