import numpy as np
import pytest

from paxserve.bench.trace import LENGTHS, TraceRequest, at_rate, draw_trace, read_trace, with_prefixes
from paxserve.errors import ConfigError


def test_drawn_traces_have_the_published_means_and_repeat():
    trace = draw_trace(LENGTHS["sharegpt"], 20_000, 2.0, seed=1)
    assert trace == draw_trace(LENGTHS["sharegpt"], 20_000, 2.0, seed=1)
    # Cutting off at 1,024 takes some of the longest: a tenth of the mean at most.
    assert 0.88 * 161.31 < np.mean([r.prompt_len for r in trace]) < 161.31
    assert 0.9 * 337.99 < np.mean([r.output_len for r in trace]) < 337.99
    assert abs(trace[-1].arrival / 20_000 - 0.5) < 0.02
    assert all(4 <= r.prompt_len <= 1024 and 4 <= r.output_len <= 1024 for r in trace)
    assert at_rate(trace, 4)[7].arrival == trace[7].arrival / 4


def test_prefixes_are_put_in_front():
    trace = with_prefixes(draw_trace(LENGTHS["alpaca"], 50, 1.0, seed=0), 3, 100, seed=0)
    assert {r.prefix for r in trace} == {"0", "1", "2"}
    assert all(r.prompt_len > r.prefix_len == 100 for r in trace)


def test_a_file_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 2, "prompt_len": 5, "output_len": 1}\n\n'
        '{"arrival": 1.5, "prompt_len": 9, "output_len": 2, "prefix": "p", "prefix_len": 4}\n'
    )
    assert read_trace(path) == [
        TraceRequest(arrival=1.5, prompt_len=9, output_len=2, prefix="p", prefix_len=4),
        TraceRequest(arrival=2.0, prompt_len=5, output_len=1),
    ]


@pytest.mark.parametrize("line", [
    "{", "[]", '{"arrival": 0, "prompt_len": 1}', '{"arrival": -1, "prompt_len": 1, "output_len": 1}',
    '{"arrival": 0, "prompt_len": 0, "output_len": 1}', '{"arrival": 0, "prompt_len": 1, "output_len": true}',
    '{"arrival": 0, "prompt_len": 3, "output_len": 1, "prefix": "a", "prefix_len": 4}',
    '{"arrival": 0, "prompt_len": 3, "output_len": 1, "prefix_len": 2}',
    '{"arrival": 0, "prompt_len": 3, "output_len": 1, "colour": 2}', "",
])  # fmt: skip
def test_lines_that_are_no_request(line, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl"):
        read_trace(path)
