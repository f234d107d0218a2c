import json

import pytest

from paxserve.bench.memory_schemes import SCHEMES, Setup
from paxserve.bench.step_times import OWN_TABLES, StepTimes, read_step_times
from paxserve.bench.trace import LENGTHS, TraceRequest, draw_trace, with_prefixes
from paxserve.config import SchedulerConfig
from paxserve.errors import ConfigError

SECOND = StepTimes(
    description="a second a step", kv_tokens=256, points=((1, 1.0), (100, 1.0)), per_context_token=0.0,
    per_prefill_pair=0.0,
)  # fmt: skip


def setup_of(times=SECOND, *, page_size=4, max_model_len=64, host_seconds=0.0, **scheduler):
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **scheduler}
    return Setup(
        times=times, config=SchedulerConfig(**scheduler), kv_tokens=times.kv_tokens, page_size=page_size,
        max_model_len=max_model_len, host_seconds=host_seconds,
    )  # fmt: skip


def ask(arrival, prompt_len, output_len, **prefix):
    return TraceRequest(arrival=arrival, prompt_len=prompt_len, output_len=output_len, **prefix)


@pytest.mark.parametrize("scheme", ["paged", "oracle", "longest"])
def test_two_requests_by_hand(scheme):
    """The second comes while the first step runs and the next is planned: it is in the third, which ends at 3 s."""
    figures = setup_of().simulation(scheme).run([ask(0, 4, 3), ask(0.5, 4, 2)])
    assert figures["num_steps"] == 4
    assert figures["duration_s"] == 4.0
    assert figures["mean_ttft_ms"] == pytest.approx((1000 + 2500) / 2)
    assert figures["mean_e2el_ms"] == pytest.approx((3000 + 3500) / 2)
    assert figures["p50_itl_ms"] == figures["max_itl_ms"] == 1000
    assert figures["mean_normalised_latency_ms"] == pytest.approx((3000 / 3 + 3500 / 2) / 2)


@pytest.mark.parametrize(("ahead", "num_steps", "ttft"), [(1, 9, 2.5), (4, 4, 8.5)])
def test_several_steps_in_one_program_by_hand(ahead, num_steps, ttft):
    """Nine tokens take as long, in fewer programs; whoever comes meanwhile waits for those that are planned."""
    figures = setup_of(num_scheduler_steps=ahead).simulation("paged").run([ask(0, 4, 9), ask(1.5, 4, 1)])
    assert figures["num_steps"] == num_steps
    assert figures["mean_ttft_ms"] == 1000 * (1 + ttft) / 2
    assert figures["max_itl_ms"] == 1000 * ahead
    assert figures["mean_tpot_ms"] == 1000


def test_what_the_host_takes_counts_where_the_device_waits_for_it():
    """Steps of a second whose Python takes three: once for each program."""
    figures = {
        ahead: setup_of(num_scheduler_steps=ahead, host_seconds=3.0).simulation("paged").run([ask(0, 4, 9)])
        for ahead in (1, 4)
    }
    assert figures[1]["duration_s"] == 9 * 3 + 1
    assert figures[4]["duration_s"] == 3 + 3 + 4 + 4
    assert setup_of(host_seconds=0.5).simulation("paged").run([ask(0, 4, 9)])["duration_s"] == 0.5 + 9


def test_a_static_batch_starts_when_the_one_before_has_ended():
    times = StepTimes(
        description="a second a row", kv_tokens=256, points=((1, 1.0), (100, 100.0)), per_context_token=0.0,
        per_prefill_pair=0.0,
    )  # fmt: skip
    figures = setup_of(times).simulation("static").run([ask(0, 1, 1), ask(0, 1, 3), ask(0.5, 1, 1)])
    # Steps of two rows, the first one's place being kept to the end of the batch; then the third request's.
    assert figures["duration_s"] == 2 + 2 + 2 + 1
    assert setup_of(times).simulation("oracle").run([ask(0, 1, 1), ask(0, 1, 3), ask(0.5, 1, 1)])["duration_s"] == 5


def test_attention_is_paid_by_what_rows_look_at():
    times = StepTimes(
        description="attention only", kv_tokens=256, points=((1, 1e-9), (2, 1e-9)), per_context_token=1.0,
        per_prefill_pair=100.0,
    )  # fmt: skip
    figures = setup_of(times).simulation("paged").run([ask(0, 4, 3)])
    # Four queries that see 1 to 4 keys (counted as 4 x 2), then rows that look back at 4 and at 5 tokens.
    assert figures["duration_s"] == pytest.approx(4 * 2 * 100 + 4 + 5)


def test_prefixes_hit_and_pages_waste_less_than_contiguous_memory():
    trace = [ask(i, 24, 30, prefix="p", prefix_len=16) for i in range(30)]
    figures = {scheme: setup_of().simulation(scheme).run(trace) for scheme in SCHEMES}
    assert figures["paged"]["prefix_hit_rate"] == pytest.approx(29 * 16 / (30 * 24))
    waste = {scheme: figures[scheme]["mean_waste"] for scheme in SCHEMES}
    assert waste["paged"] < waste["oracle"] < waste["longest"]
    assert figures["paged"]["mean_running"] >= figures["oracle"]["mean_running"]


def test_a_pool_that_is_too_small_preempts_and_still_serves_all():
    trace = [ask(0, 20, 40) for _ in range(8)]
    figures = setup_of().simulation("paged").run(trace)
    assert figures["num_preemptions"] > 0
    assert figures["num_requests"] == 8


def test_the_papers_order_of_the_schemes():
    times = read_step_times("opt-13b-a100")
    setup = Setup(
        times=times, config=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048),
        kv_tokens=times.kv_tokens, page_size=16, max_model_len=2048,
    )  # fmt: skip
    trace = draw_trace(LENGTHS["sharegpt"], 120, 1.0, seed=0)
    setup.check(trace)
    rates = setup.compare(trace)["sustainable_rate"]
    assert rates["paged"] > 1.2 * rates["oracle"] > 1.2 * rates["longest"] > 0
    assert rates["longest"] >= rates["static"]
    with pytest.raises(ConfigError, match="a sequence may have 2048"):
        setup.check(with_prefixes(trace, 1, 2000, seed=0))


@pytest.mark.parametrize("name", OWN_TABLES)
def test_own_tables_rise_with_the_tokens(name):
    times = read_step_times(name)
    seconds = [times.products(count) for count in (1, 2, 16, 100, 512, 2048, 4096)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert times.products(4096) > times.products(2048), "the last slope goes on"


@pytest.mark.parametrize("change", [
    {"step_seconds": {"1": 1.0}}, {"step_seconds": {"a": 1.0, "2": 2}}, {"step_seconds": {"1": 0, "2": 1}},
    {"kv_tokens": None}, {"colour": 1},
])  # fmt: skip
def test_tables_that_are_refused(change, tmp_path):
    table = {
        "kv_tokens": 10, "step_seconds": {"1": 1, "2": 2}, "seconds_per_decode_context_token": 0,
        "seconds_per_prefill_pair": 0,
    }  # fmt: skip
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    assert read_step_times(str(path)).products(3) == 3
    path.write_text(json.dumps(table | change))
    with pytest.raises(ConfigError, match=r"table\.json"):
        read_step_times(str(path))
    with pytest.raises(ConfigError, match="Own tables"):
        read_step_times(str(tmp_path / "none.json"))
