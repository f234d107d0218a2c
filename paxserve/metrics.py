"""What the server counts, under vLLM's metric names, so that its dashboards and routers work unchanged."""

import time
from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from paxserve.config import EngineConfig
from paxserve.engine.board import Board
from paxserve.engine_metrics import LABELS, EngineMetrics
from paxserve.messages import EngineOutput, EngineRequest, ModelInfo
from paxserve.outputs import RequestMetrics as RequestTimes
from paxserve.outputs import RequestOutput
from paxserve.pooling_outputs import PoolingRequestOutput

FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def powers_of_ten(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to `limit`."""
    buckets: list[int] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > limit:
                return buckets or [1]
            buckets.append(digit * scale)
        scale *= 10


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, config: EngineConfig, info: ModelInfo, board: Board | None = None) -> None:
        disable_created_metrics()  # a second sample of each counter and histogram that no dashboard reads
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        ProcessCollector(registry=self.registry)
        self.engine = EngineMetrics(model_name, config, info, board or Board())
        self.registry.register(self.engine)
        finished = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._finished = {reason: finished.labels(**self._labels, finished_reason=reason) for reason in FINISH_REASONS}
        self._refused = Counter(
            "vllm:admission_rejections",
            "Requests refused because the queue was full.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._refused.labels(model_name=model_name, reason=reason)
        self._make_histograms(info.max_model_len)
        self.requests = RequestMetrics(self)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def record_refusal(self, reason: str) -> None:
        """A request was refused because the queue was full."""
        self._refused.labels(model_name=self._labels["model_name"], reason=reason).inc()

    def record_finish(self, reason: str) -> None:
        """Count a choice that ended, by its reason."""
        self._finished[reason if reason in self._finished else "error"].inc()

    def _make_histograms(self, max_model_len: int) -> None:
        lengths = powers_of_ten(max_model_len)
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", TOKEN_BUCKETS
        )
        self.time_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a request's tokens after its first.",
            TOKEN_BUCKETS,
        )
        self.whole_request = self._seconds("e2e_request_latency", "From arrival to the last token.")
        self.queue_time = self._seconds("request_queue_time", "From arrival to the first step.")
        self.inference_time = self._seconds("request_inference_time", "From the first step to the last token.")
        self.prefill_time = self._seconds("request_prefill_time", "From the first step to the first token.")
        self.decode_time = self._seconds("request_decode_time", "From the first token to the last.")
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.output_length = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", lengths
        )
        self.longest_output = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice.", lengths
        )
        self.computed_length = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that were computed.", lengths
        )
        self.max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", lengths)
        self.num_choices = self._histogram("vllm:request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self.preemptions = self._histogram(
            "vllm:request_num_preemptions", "Times a request was preempted.", (1, 2, 3, 4, 5, 10, 20)
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(**self._labels)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", text, REQUEST_BUCKETS)


class _Progress:
    """One request in flight, as far as it is measured."""

    __slots__ = ("last_token_times", "num_tokens", "request")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.num_tokens = [0] * request.params.n
        self.last_token_times = [0.0] * request.params.n


class RequestMetrics:
    """Follows each request from its arrival to its end and fills the histograms of `Metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._requests: dict[str, _Progress] = {}

    def begin(self, request: EngineRequest) -> None:
        """A request has been given to the core."""
        self._requests[request.request_id] = _Progress(request)

    def record(self, outputs: Sequence[EngineOutput]) -> None:
        """A step has brought these outputs."""
        now = time.time()
        for output in outputs:
            progress = self._requests.get(output.request_id)
            if progress is None or not output.new_token_ids:
                continue
            index = output.index
            last = progress.last_token_times[index]
            if last:
                self._metrics.inter_token.observe((now - last) / len(output.new_token_ids))
            elif not any(progress.num_tokens):
                self._metrics.first_token.observe(now - progress.request.arrival_time)
            progress.last_token_times[index] = now
            progress.num_tokens[index] += len(output.new_token_ids)

    def forget(self, request_id: str) -> None:
        """A request has ended without an answer."""
        self._requests.pop(request_id, None)

    def end(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """A request has ended, all choices of it."""
        progress = self._requests.pop(output.request_id, None)
        if progress is None:
            return
        metrics, params = self._metrics, progress.request.params
        metrics.prompt_length.observe(len(progress.request.prompt_token_ids))
        computed = len(progress.request.prompt_token_ids) - output.num_cached_tokens
        metrics.computed_length.observe(max(0, computed))
        if progress.request.pooling is None:
            metrics.output_length.observe(sum(progress.num_tokens))
            metrics.longest_output.observe(max(progress.num_tokens))
            metrics.num_choices.observe(params.n)
        if params.max_tokens is not None:
            metrics.max_tokens.observe(params.max_tokens)
        if output.metrics is not None:
            self._observe_times(output.metrics, max(progress.num_tokens))

    def _observe_times(self, times: RequestTimes, num_tokens: int) -> None:
        metrics, first, last = self._metrics, times.first_token_time, times.last_token_time
        metrics.preemptions.observe(times.num_preemptions)
        if times.finished_time is not None:
            metrics.whole_request.observe(times.finished_time - times.arrival_time)
        scheduled = times.first_scheduled_time
        if scheduled is None:
            return
        metrics.queue_time.observe(max(0.0, scheduled - times.arrival_time))
        if first is None or last is None:
            return
        metrics.prefill_time.observe(max(0.0, first - scheduled))
        metrics.inference_time.observe(max(0.0, last - scheduled))
        metrics.decode_time.observe(last - first)
        if num_tokens > 1:
            metrics.time_per_token.observe((last - first) / (num_tokens - 1))
