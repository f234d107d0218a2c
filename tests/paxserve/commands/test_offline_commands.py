"""generate, chat, bench throughput and bench latency, whole, on one engine with a tiny checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest

from paxserve import cli
from paxserve.bench import offline
from paxserve.llm import LLM

CHECKPOINT = Path(__file__).parents[2] / "goldens" / "llama"


@pytest.fixture(scope="module")
def engine():
    return LLM(str(CHECKPOINT), skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(autouse=True)
def built_with(engine, monkeypatch):
    """The arguments that a command builds its engine with; it gets the one above, as compiling one takes long."""
    arguments = []

    def build(**flags):
        arguments.append(flags)
        return engine

    monkeypatch.setattr(offline, "LLM", build)
    monkeypatch.setattr("paxserve.llm.LLM", build)
    return arguments


def test_generate_prints_the_reference_tokens(built_with, tmp_path, capsys):
    golden = np.load(CHECKPOINT / "golden.npz")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt_token_ids": golden[f"prompt_{n}"].tolist()}) + "\n" for n in range(3))
    )
    sampling = ["--temperature", "0", "--ignore-eos", "--max-tokens", "12"]
    assert cli.main(["generate", "--model", "m", "--seed", "3", "--file", str(prompts), "--jsonl", *sampling]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["outputs"][0]["token_ids"] for row in rows] == [golden[f"greedy_{n}"].tolist() for n in range(3)]
    assert {row["outputs"][0]["finish_reason"] for row in rows} == {"length"}
    assert built_with == [{"model": "m", "seed": 3}]


def test_generate_prints_several_outputs_and_refuses_wrong_parameters(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6]}\n')
    command = ["generate", "--model", "m", "--file", str(prompts), "--max-tokens", "2"]
    assert cli.main([*command, "-n", "3", "--jsonl"]) == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"]) == 3
    assert cli.main([*command, "--temperature", "9"]) == 2
    assert capsys.readouterr().err == "paxserve: temperature must be in [0, 2], got 9.0.\n"


@pytest.mark.parametrize("dataset", ["random", "file"])
def test_throughput_counts_what_was_asked(dataset, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}\n{"prompt_token_ids": [8], "max_tokens": 2}\n')
    chosen = ["--dataset", str(rows)]
    if dataset == "random":
        chosen = [
            "--num-prompts",
            "3",
            "--random-input-len",
            "5",
            "--random-output-len",
            "2",
            "--random-vocab-size",
            "64",
        ]
    out = tmp_path / "out.json"
    assert cli.main(["bench", "throughput", "--model", "m", *chosen, "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    expected = {"random": (3, 15, 6), "file": (2, 4, 6)}[dataset]
    assert (result["num_requests"], result["total_input_tokens"], result["total_output_tokens"]) == expected
    assert result["output_tokens_per_second"] == pytest.approx(expected[2] / result["elapsed_time"])
    assert f"{expected[1]} tokens in and {expected[2]} out" in capsys.readouterr().out


def test_latency_measures_the_runs_it_is_told(tmp_path, capsys):
    out = tmp_path / "out.json"
    batch = ["--batch-size", "2", "--input-len", "4", "--output-len", "3", "--random-vocab-size", "64"]
    runs = ["--num-iters", "3", "--num-iters-warmup", "1", "--output-json", str(out)]
    assert cli.main(["bench", "latency", "--model", "m", *batch, *runs]) == 0
    result = json.loads(out.read_text())
    assert len(result["latencies"]) == 3
    assert result["mean_latency_ms"] == pytest.approx(1000 * np.mean(result["latencies"]))
    assert "2 x (4 in, 3 out)" in capsys.readouterr().out


def test_chat_needs_a_tokenizer(capsys):
    assert cli.main(["chat", "--model", "m"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
