import os
import time

import pytest

from paxserve.bench.datasets import BenchRequest
from paxserve.bench.http_overhead import cpu_seconds, measure_overhead
from paxserve.cli import main
from paxserve.llm import LLM


def test_processor_time_is_that_of_the_process():
    before, own = cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() < own + 0.2:
        pass
    assert cpu_seconds([os.getpid()]) - before == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--num-prompts", "0"], ["--workload", "W9"]])
def test_arguments_that_are_refused(arguments, capsys):
    try:
        status = main(["bench", "http", "no-model", *arguments])
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.e2e
def test_both_sides_are_measured():
    llm = LLM("smollm2-135m-instruct", max_num_seqs=4, max_model_len=256)
    requests = [BenchRequest(prompt=[7, 8, 9, number], max_tokens=5) for number in range(3)]
    result = measure_overhead("smollm2-135m-instruct", ["--max-num-seqs", "4"], llm, requests, rounds=2, timeout=300)
    assert len(result["rounds"]) == 2
    for row in result["rounds"]:
        assert all(seconds > 0 for name, seconds in row.items() if name != "overhead")
        assert row["overhead"] == row["served_seconds"] / row["offline_seconds"] - 1
