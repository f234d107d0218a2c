"""Sums, percentiles, and files, on figures worked out by hand."""

import json
import sys

import pytest

from paxserve.bench import plot, report
from paxserve.bench.client import Record
from paxserve.errors import ConfigError

RECORDS = [
    Record(prompt_len=10, start=5.0, ttft=1.0, itls=[0.5, 0.5, 1.0], latency=3.0, output_len=4),
    Record(prompt_len=20, start=6.0, ttft=3.0, itls=[], latency=3.0, output_len=1),
    Record(prompt_len=30, start=9.5, error="HTTP 500: broken"),
]


def test_summary_by_hand():
    summary = report.summarise(RECORDS, duration=10.0)
    assert (summary["completed"], summary["failed"], summary["max_concurrent_requests"]) == (2, 1, 2)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 5)
    assert summary["request_throughput"] == pytest.approx(0.2)
    assert summary["output_throughput"] == pytest.approx(0.5)
    assert summary["total_token_throughput"] == pytest.approx(3.5)
    assert summary["mean_ttft_ms"] == summary["median_ttft_ms"] == pytest.approx(2000)
    assert summary["p90_ttft_ms"] == pytest.approx(2800)
    assert summary["std_ttft_ms"] == pytest.approx(1000)
    assert summary["mean_tpot_ms"] == pytest.approx(2000 / 3)
    assert summary["median_itl_ms"] == pytest.approx(500)
    assert summary["mean_e2el_ms"] == pytest.approx(3000)


def test_text_and_failures():
    summary = report.summarise(RECORDS, duration=10.0)
    text = report.as_text(summary)
    assert "2 succeeded, 1 failed" in text
    assert "0.50 tokens/s" in text
    assert report.failures(RECORDS) == ["1 x HTTP 500: broken"]


def test_nothing_succeeded():
    summary = report.summarise(RECORDS[2:], duration=1.0)
    assert summary["mean_ttft_ms"] is None
    assert summary["output_throughput"] == 0
    assert " - " in report.as_text(summary)


def test_saved_results_read_back(tmp_path):
    result = report.summarise(RECORDS, 10.0) | report.per_request(RECORDS)
    report.save(tmp_path / "out.json", result)
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert result["start_times"] == [0.0, 1.0, 4.5]
    with pytest.raises(ConfigError, match="Cannot write"):
        report.save(tmp_path / "none" / "out.json", result)


@pytest.mark.parametrize("records", [RECORDS, RECORDS[2:]])
def test_a_plot_is_drawn(records, tmp_path):
    plot.draw(report.per_request(records), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_or_with_a_wrong_name(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ConfigError, match=r"pip install 'paxserve\[plot\]'"):
            plot.draw(report.per_request(RECORDS), tmp_path / "out.png")
    with pytest.raises(ConfigError, match="Cannot write the plot"):
        plot.draw(report.per_request(RECORDS), tmp_path / "out.nonsense")
