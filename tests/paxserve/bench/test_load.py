"""The load generator against a real HTTP server that streams as vLLM does, at a known pace."""

import asyncio

import numpy as np
import pytest

from paxserve.bench import load, report
from paxserve.bench.client import Target
from paxserve.bench.datasets import BenchRequest
from paxserve.bench.load import Load
from paxserve.errors import ConfigError
from tests.paxserve.paced_server import FIRST, NEXT, running


@pytest.fixture
def server():
    with running() as paced:
        yield paced


def drive(server, requests, shape=None, **target):
    goal = Target(root=server.root, model="paced", **target)
    return asyncio.run(load.run_load(goal, requests, shape or Load()))


def test_times_and_tokens_are_the_servers(server):
    requests = [BenchRequest(prompt=[1, 2, 3], max_tokens=5), BenchRequest(prompt=[1], max_tokens=1)]
    records, duration = drive(server, requests, ignore_eos=True)
    long, short = records
    assert all(record.is_success for record in records)
    assert (long.prompt_len, long.output_len, len(long.itls)) == (3, 5, 4)
    assert (short.prompt_len, short.output_len, short.itls) == (1, 1, [])
    assert FIRST <= long.ttft < FIRST + 0.5
    assert sum(long.itls) + long.ttft == pytest.approx(long.latency)
    assert FIRST + 4 * NEXT <= long.latency <= duration
    assert np.median(long.itls) == pytest.approx(NEXT, abs=0.015)
    sent = next(body for body in server.bodies if body["max_tokens"] == 5)
    assert sent["ignore_eos"]
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["temperature"] == 0


def test_failures_are_counted_and_named(server):
    prompts = [[1], [13], [14], [13]]
    records, duration = drive(server, [BenchRequest(prompt=prompt, max_tokens=2) for prompt in prompts])
    summary = report.summarise(records, duration)
    assert (summary["completed"], summary["failed"]) == (1, 3)
    assert report.failures(records) == ["2 x HTTP 400: Thirteen.", "1 x Fourteen."]
    assert summary["total_output_tokens"] == 2


def test_a_server_that_is_gone_is_a_failure(server):
    gone = Target(root="http://127.0.0.1:9", model="paced")
    records, _ = asyncio.run(load.run_load(gone, [BenchRequest(prompt=[1], max_tokens=1)], Load()))
    assert "ConnectError" in records[0].error


def test_concurrency_is_bounded(server):
    requests = [BenchRequest(prompt=[1], max_tokens=2)] * 6
    records, duration = drive(server, requests, Load(max_concurrency=2))
    assert report.most_at_once(records) == 2
    assert duration >= 3 * (FIRST + NEXT)
    records, _ = drive(server, requests)
    assert report.most_at_once(records) == 6


def test_arrivals_follow_the_rate_or_the_requests_own_times():
    plain = [BenchRequest(prompt=[1], max_tokens=1)] * 4000
    times = Load(request_rate=20, seed=1).arrivals(plain)
    gaps = np.diff([0, *times])
    assert times == Load(request_rate=20, seed=1).arrivals(plain)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)  # a Poisson process: deviation equals mean
    assert np.diff(Load(request_rate=20, burstiness=100, seed=1).arrivals(plain)).std() < 0.2 / 20
    assert Load().arrivals(plain[:2]) == [0, 0]
    assert Load().arrivals([BenchRequest(prompt=[1], max_tokens=1, arrival=1.5)]) == [1.5]


def test_arrival_times_are_kept(server):
    requests = [BenchRequest(prompt=[1], max_tokens=1, arrival=at) for at in (0.0, 0.2)]
    records, _ = drive(server, requests)
    assert records[1].start - records[0].start == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize("wrong", [{"request_rate": 0}, {"burstiness": -1}, {"max_concurrency": 0}])
def test_impossible_loads_are_refused(wrong):
    with pytest.raises(ConfigError):
        Load(**wrong)


def test_the_trial_request_reports_what_the_server_says(server):
    request = BenchRequest(prompt=[1], max_tokens=100)
    asyncio.run(load.check_server(Target(root=server.root, model="paced"), request, None))
    assert server.bodies[-1]["max_tokens"] == 2
    with pytest.raises(ConfigError, match="HTTP 404: No such model"):
        asyncio.run(load.check_server(Target(root=server.root, model="other"), request, None))


def test_the_models_name_comes_from_the_server(server):
    assert load.served_model(server.root, None) == "paced"
    with pytest.raises(ConfigError, match="--model"):
        load.served_model("http://127.0.0.1:9", None)
