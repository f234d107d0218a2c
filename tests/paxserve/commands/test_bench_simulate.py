import json

import pytest

from paxserve import cli


def test_a_trace_is_simulated_with_the_schedulers_flags(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt_len": 40, "output_len": 3}\n' * 2)
    flags = ["--dataset", str(trace), "--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
    assert cli.main(["bench", "simulate", *flags]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_requests"], figures["num_steps"]) == (2, 2 * 3 + 2 * 2)


def test_a_comparison_has_every_scheme(capsys):
    assert cli.main(["bench", "simulate", "--compare", "--num-prompts", "20", "--dataset", "alpaca"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["sustainable_rate"]) == {"paged", "oracle", "longest", "static"}
    assert figures["paged_over"]["paged"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--request-rate", "0"], "request_rate must be greater than 0"),
        (["--dataset", "none.jsonl"], "Cannot read the trace"),
        (["--max-model-len", "100"], "a sequence may have 100"),
        (["--max-num-partial-prefills", "0"], "max_num_partial_prefills must be at least 1"),
    ],
)
def test_arguments_that_are_refused(arguments, words, capsys):
    assert cli.main(["bench", "simulate", "--num-prompts", "30", *arguments]) == 2
    assert words in capsys.readouterr().err
