from dataclasses import replace

import pytest

from paxserve.config import EngineConfig, ModelConfig
from paxserve.messages import EngineOutput, EngineRequest, EngineStats
from paxserve.metrics import Metrics, powers_of_ten
from paxserve.outputs import RequestMetrics, RequestOutput
from paxserve.sampling_params import SamplingParams
from tests.paxserve.fake_core import FakeCore

CONFIG = EngineConfig(model=ModelConfig(model="fake"))


def make_metrics() -> Metrics:
    return Metrics("fake", CONFIG, FakeCore(CONFIG).model_info)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "fake", "engine": "0", **labels})


@pytest.mark.parametrize(
    ("limit", "buckets"),
    [(1, [1]), (0, [1]), (7, [1, 2, 5]), (10, [1, 2, 5, 10]), (250, [1, 2, 5, 10, 20, 50, 100, 200])],
)
def test_length_buckets(limit, buckets):
    assert powers_of_ten(limit) == buckets


def test_counters_follow_the_core_and_gauges_its_last_word():
    metrics = make_metrics()
    for steps, running, pages in ((1, 3, 40), (2, 5, 50), (2, 0, 0)):
        stats = EngineStats(
            num_steps=steps, num_running=running, num_pages=100, num_pages_in_use=pages, prompt_tokens=10 * steps,
            step_tokens=7 * steps, step_sizes=[0, steps, *[0] * 12], step_seconds={"wait": 0.5 * steps},
            recompilations=steps - 1, prefix_cache_hits=steps,
        )  # fmt: skip
        metrics.engine.stats = stats
        assert value(metrics, "vllm:num_requests_running") == running
        assert value(metrics, "vllm:kv_cache_usage_perc") == pages / 100
    assert value(metrics, "vllm:prompt_tokens_total") == 20
    assert value(metrics, "vllm:prefix_cache_hits_total") == 2
    assert value(metrics, "paxserve:recompilations_total") == 1
    assert value(metrics, "paxserve:step_seconds_total", phase="wait") == 1.0
    assert value(metrics, "vllm:iteration_tokens_total_count") == 2
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 14
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="1.0") == 0
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="8.0") == 2
    metrics.engine.stats = replace(stats, num_running=3, num_waiting=2)
    metrics.engine.record_death()
    assert value(metrics, "vllm:num_requests_running") == value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:prompt_tokens_total") == 20


def test_a_request_fills_every_histogram_once():
    metrics = make_metrics()
    params = SamplingParams(max_tokens=9, n=2)
    request = EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=params, arrival_time=100.0)
    metrics.requests.begin(request)
    for index in (0, 1, 0, 0):
        metrics.requests.record([EngineOutput(request_id="a", index=index, new_token_ids=[5])])
    metrics.requests.record([EngineOutput(request_id="unknown", new_token_ids=[5])])
    times = RequestMetrics(
        arrival_time=100.0, first_scheduled_time=101.0, first_token_time=103.0, last_token_time=107.0,
        finished_time=108.0, num_preemptions=1,
    )  # fmt: skip
    metrics.record_finish("stop")
    metrics.record_finish("something new")
    metrics.requests.end(RequestOutput(request_id="a", prompt=None, prompt_token_ids=[1, 2, 3], metrics=times))
    metrics.requests.end(RequestOutput(request_id="a", prompt=None, prompt_token_ids=[1, 2, 3], metrics=times))
    sums = {
        "e2e_request_latency_seconds": 8, "request_queue_time_seconds": 1, "request_prefill_time_seconds": 2,
        "request_inference_time_seconds": 6, "request_decode_time_seconds": 4, "request_prompt_tokens": 3,
        "request_generation_tokens": 4, "request_max_num_generation_tokens": 3, "request_params_n": 2,
        "request_params_max_tokens": 9, "request_num_preemptions": 1, "request_time_per_output_token_seconds": 2,
    }  # fmt: skip
    for name, total in sums.items():
        assert value(metrics, f"vllm:{name}_sum") == total, name
        assert value(metrics, f"vllm:{name}_count") == 1, name
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
