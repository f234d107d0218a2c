"""Data sets: the same seed gives the same requests, and a bad row is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve.bench import datasets
from paxserve.bench.datasets import BenchRequest, RandomLengths
from paxserve.errors import ConfigError


@given(
    num=st.integers(1, 8),
    lengths=st.builds(
        RandomLengths,
        input_len=st.integers(1, 50),
        output_len=st.integers(1, 50),
        range_ratio=st.floats(0, 0.99),
        prefix_len=st.integers(0, 5),
        vocab_size=st.integers(4, 100),
    ),
    seed=st.integers(0, 2**32),
)
def test_random_requests_are_as_asked(num, lengths, seed):
    requests = datasets.random_requests(num, lengths, seed)
    assert requests == datasets.random_requests(num, lengths, seed)
    assert len(requests) == num
    for request in requests:
        own = len(request.prompt) - lengths.prefix_len
        assert 1 <= own
        assert abs(own - lengths.input_len) <= lengths.input_len * lengths.range_ratio + 0.5
        assert abs(request.max_tokens - lengths.output_len) <= lengths.output_len * lengths.range_ratio + 0.5
        assert all(3 <= token < lengths.vocab_size for token in request.prompt)
        assert request.prompt[: lengths.prefix_len] == requests[0].prompt[: lengths.prefix_len]


@pytest.mark.parametrize("wrong", [{"input_len": 0}, {"range_ratio": 1.0}, {"vocab_size": 3}, {"prefix_len": -1}])
def test_impossible_lengths_are_refused(wrong):
    with pytest.raises(ConfigError):
        RandomLengths(**wrong)


def test_jsonl_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hi", "max_tokens": 3}\n\n{"prompt_token_ids": [5, 6]}\n')
    assert datasets.read_jsonl(path, 9) == [
        BenchRequest(prompt="Hi", max_tokens=3),
        BenchRequest(prompt=[5, 6], max_tokens=9),
    ]


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        '{"text": "Hi"}',
        '{"prompt": "Hi", "prompt_token_ids": [1]}',
        '{"prompt": "Hi", "temperature": 1}',
        '{"prompt": ""}',
        '{"prompt": [1]}',
        '{"prompt_token_ids": ["a"]}',
        '{"prompt": "Hi", "max_tokens": 0}',
    ],
)
def test_a_bad_row_is_named_by_its_line(row, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hi"}\n' + row + "\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: "):
        datasets.read_jsonl(path, 1)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ConfigError, match="Cannot read"):
        datasets.read_jsonl(tmp_path / "none.jsonl", 1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        datasets.read_jsonl(tmp_path / "empty.jsonl", 1)


def test_the_workloads_are_what_their_description_says():
    w1 = datasets.read_workload("W1")
    assert (len(w1), sum(len(r.prompt) for r in w1), {r.max_tokens for r in w1}) == (64, 18_491, {64})
    (w2,) = datasets.read_workload("W2")
    assert (len(w2.prompt), w2.max_tokens) == (128, 128)
    w4 = datasets.read_workload("W4")
    assert len(w4) == 32
    assert len({tuple(r.prompt[:768]) for r in w4}) == 1
    assert {(len(r.prompt), r.max_tokens) for r in w4} == {(800, 16)}


def test_w3_is_w1_with_arrivals():
    slow, fast = datasets.read_workload("W3", rate=1.0), datasets.read_workload("W3", rate=4.0)
    assert [r.prompt for r in slow] == [r.prompt for r in datasets.read_workload("W1")]
    times = [r.arrival for r in slow]
    assert times == sorted(times)
    assert [r.arrival for r in fast] == pytest.approx([at / 4 for at in times])
    with pytest.raises(ConfigError, match="rate"):
        datasets.read_workload("W3")


def test_another_workload_file(tmp_path):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"W2": {"requests": [{"prompt_ids": [1, 2], "max_tokens": 4}]}}))
    assert datasets.read_workload("W2", path=path) == [BenchRequest(prompt=[1, 2], max_tokens=4)]
    with pytest.raises(ConfigError, match="no workload W1"):
        datasets.read_workload("W1", path=path)
    with pytest.raises(ConfigError, match="Cannot read"):
        datasets.read_workload("W1", path=tmp_path / "none.json")


def test_changed_prompts():
    request = BenchRequest(prompt=[1, 2, 3], max_tokens=4, arrival=0.5)
    assert datasets.with_first_token([request], 9) == [BenchRequest(prompt=[9, 2, 3], max_tokens=4, arrival=0.5)]
    assert datasets.reversed_prompt(request).prompt == [3, 2, 1]
    assert datasets.reversed_prompt(BenchRequest(prompt="abc", max_tokens=1)).prompt == "abc"
