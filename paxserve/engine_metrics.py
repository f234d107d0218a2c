"""What the engine core counts, as metrics: every front tells the same of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from paxserve.config import EngineConfig
from paxserve.engine.board import Board
from paxserve.messages import STEP_TOKEN_BUCKETS, EngineStats, ModelInfo

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
LABELS = ("model_name", "engine")

COUNTERS = {
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "vllm:external_prefix_cache_queries": ("offloaded_queries", "Prompt tokens looked up in host memory."),
    "vllm:external_prefix_cache_hits": ("offloaded_hits", "Prompt tokens whose pages came back from host memory."),
    "vllm:num_preemptions": ("num_preemptions", "Requests put back into the queue for want of pages."),
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of the requests that were begun."),
    "vllm:prompt_tokens_cached": ("prefix_cache_hits", "Prompt tokens that did not have to be computed."),
    "vllm:generation_tokens": ("generation_tokens", "Tokens generated."),
    "paxserve:padding_tokens": ("padding_tokens", "Positions computed only to fill the size of a program."),
    "paxserve:steps": ("num_steps", "Steps of the engine."),
    "paxserve:recompilations": ("recompilations", "Compilations while serving; each one is a bug."),
}
"""Counters that are a counter of `EngineStats`."""

GAUGES = {
    "vllm:num_requests_running": ("num_running", "Requests in the engine's steps."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests in the queue."),
    "paxserve:programs": ("num_programs", "Compiled step programs."),
    "paxserve:pages_in_use": ("num_pages_in_use", "KV pages that requests hold."),
    "paxserve:wasted_tokens": ("wasted_tokens", "KV positions allocated to requests and holding no token."),
}
"""Gauges that are a field of `EngineStats`."""

StatsValue = Callable[[EngineStats], int]
Kind = type[Counter] | type[Gauge]


def _cached(stats: EngineStats) -> int:
    return stats.prefix_cache_hits


def _computed(stats: EngineStats) -> int:
    return max(0, stats.prompt_tokens - stats.prefix_cache_hits)


def _none(stats: EngineStats) -> int:
    return 0


SHARES: dict[str, dict[str, StatsValue]] = {
    "vllm:prompt_tokens_by_source": {
        "computed": _computed, "local_cache_hit": _cached, "external_kv_transfer": _none,
    },
    "vllm:prompt_tokens_cached_by_source": {
        "device": _cached, "host": _none, "p2p": _none, "disk": _none, "external_unspecified": _none,
    },
}  # fmt: skip
"""Counters of prompt tokens by where they came from; there is no cache but the one on the device."""


class EngineMetrics(Collector):
    """Metrics of one engine core, made when they are asked for from the last that it said of itself."""

    def __init__(self, model_name: str, config: EngineConfig, info: ModelInfo, board: Board) -> None:
        self.stats = EngineStats(num_programs=info.num_programs, num_pages=info.num_pages)
        self._board = board
        self._values = (model_name, "0")
        self._cache = cache_description(config, info)

    def record_death(self) -> None:
        """The core has died: what it counted stays, what it held is gone."""
        self.stats = replace(self.stats, num_running=0, num_waiting=0, num_pages_in_use=0, wasted_tokens=0)

    def collect(self) -> Iterator[Metric]:
        """Every metric."""
        stats, usage = self.stats, self.stats.num_pages_in_use / max(1, self.stats.num_pages)
        for name, (field, text) in COUNTERS.items():
            yield self._one(Counter, name, text, getattr(stats, field))
        for name, parts in SHARES.items():
            values = {part: value(stats) for part, value in parts.items()}
            yield self._each(Counter, name, "Prompt tokens by where they came from.", "source", values)
        seconds = stats.step_seconds
        yield self._each(Counter, "paxserve:step_seconds", "Host time of the steps by phase.", "phase", seconds)
        for name, (field, text) in GAUGES.items():
            yield self._one(Gauge, name, text, getattr(stats, field))
        yield self._one(Gauge, "vllm:kv_cache_usage_perc", "Share of the KV pages that requests hold, 0 to 1.", usage)
        waiting = {"capacity": stats.num_waiting, "deferred": 0}  # nothing is waited for but room
        yield self._each(Gauge, "vllm:num_requests_waiting_by_reason", "Requests in the queue.", "reason", waiting)
        states = {state: number == self._board.sleep_level for number, state in enumerate(SLEEP_STATES)}
        yield self._each(
            Gauge, "vllm:engine_sleep_state", "1 for the state that the engine is in.", "sleep_state", states
        )
        yield self._step_sizes()
        about = Gauge("vllm:cache_config_info", "The KV cache's configuration.", labels=list(self._cache))
        about.add_metric(list(self._cache.values()), 1)
        yield about

    def _one(self, kind: Kind, name: str, text: str, value: float) -> Metric:
        family = kind(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _each(self, kind: Kind, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = kind(name, text, labels=(*LABELS, label))
        for part, value in values.items():
            family.add_metric((*self._values, part), value)
        return family

    def _step_sizes(self) -> Metric:
        bounds = [*map(floatToGoString, STEP_TOKEN_BUCKETS), "+Inf"]
        counts = self.stats.step_sizes or [0] * len(bounds)
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens a step computed.", labels=LABELS)
        family.add_metric(self._values, list(zip(bounds, accumulate(counts), strict=True)), self.stats.step_tokens)
        return family


def cache_description(config: EngineConfig, info: ModelInfo) -> dict[str, str]:
    """The KV cache's configuration as labels."""
    cache = config.cache
    values = {
        "block_size": info.page_size,
        "num_gpu_blocks": info.num_pages,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "cache_dtype": cache.kv_cache_dtype,
        "num_gpu_blocks_override": cache.num_gpu_blocks_override,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
    }
    return {name: str(value) for name, value in values.items()} | {"engine": "0"}
