import re
from pathlib import Path

import pytest
from prometheus_client import Gauge

from paxserve.config import EngineConfig, ModelConfig
from paxserve.engine.board import Board
from paxserve.entrypoints.fronts.metrics_pool import MetricsPool
from paxserve.messages import EngineStats
from paxserve.metrics import Metrics
from tests.paxserve.fake_core import FakeCore

CONFIG = EngineConfig(model=ModelConfig(model="fake"))


def make_pool(front: int, folder: Path) -> tuple[Metrics, MetricsPool]:
    metrics = Metrics("fake", CONFIG, FakeCore(CONFIG).model_info, Board())
    return metrics, MetricsPool(front, folder, metrics)


def samples(text: bytes, start: str) -> dict[str, float]:
    """What a scrape says under names that begin so."""
    found = re.findall(rf"^({start}.*) (\S+)$", text.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_counts_of_all_are_added_and_those_of_the_core_are_not(tmp_path):
    (one, first), (two, second) = make_pool(1, tmp_path), make_pool(2, tmp_path)
    for metrics, count in ((one, 3), (two, 4)):
        metrics.engine.stats = EngineStats(generation_tokens=50, num_running=2, num_pages=10, num_pages_in_use=5)
        for _ in range(count):
            metrics.record_finish("stop")
            metrics.first_token.observe(0.03 * count)
    first.save()
    second.save()
    for pool in (first, second):
        text = pool.render([1, 2])
        assert samples(text, "vllm:request_success_total.*stop") == {
            'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"}': 7.0
        }
        labels = '{engine="0",model_name="fake"}'
        assert list(samples(text, "vllm:time_to_first_token_seconds_count").values()) == [7.0]
        assert list(samples(text, "vllm:time_to_first_token_seconds_sum").values()) == pytest.approx([0.75])
        times = samples(text, "vllm:time_to_first_token_seconds_bucket")
        assert [times[key] for key in times if 'le="0.1"' in key or 'le="0.25"' in key] == [3.0, 7.0]
        assert samples(text, "vllm:generation_tokens_total") == {f"vllm:generation_tokens_total{labels}": 50.0}
        assert samples(text, "vllm:num_requests_running") == {f"vllm:num_requests_running{labels}": 2.0}
        assert samples(text, "vllm:kv_cache_usage_perc") == {f"vllm:kv_cache_usage_perc{labels}": 0.5}


def test_a_front_that_has_ended_still_counts_but_holds_nothing(tmp_path):
    (one, first), (two, second) = make_pool(1, tmp_path), make_pool(2, tmp_path)
    for metrics, held in ((one, 5), (two, 6)):
        metrics.record_finish("stop")
        Gauge("held_things", "For this test.", registry=metrics.registry).set(held)
    first.save()
    second.save()
    assert samples(second.render([1, 2]), "held_things") == {"held_things": 11.0}
    alone = second.render([2])
    assert samples(alone, "held_things") == {"held_things": 6.0}
    assert list(samples(alone, "vllm:request_success_total.*stop").values()) == [2.0]


def test_labels_that_only_one_has_seen_are_told_too(tmp_path):
    (one, first), (two, second) = make_pool(1, tmp_path), make_pool(2, tmp_path)
    one.record_refusal("max_num_queued_reqs")
    two.record_refusal("something new")
    first.save()
    second.save()
    refused = samples(first.render([1, 2]), "vllm:admission_rejections_total")
    assert sorted(refused.values()) == [0.0, 1.0, 1.0]
    starts = [samples(pool.render([1, 2]), "process_start_time_seconds") for pool in (first, second)]
    assert starts[0] == starts[1]
    assert len(starts[0]) in (0, 1)  # none where the system does not tell
