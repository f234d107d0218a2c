"""bench serve and bench workload, whole, against a server with a known pace."""

import json
import os

import pytest

from paxserve import cli
from paxserve.commands import bench_workload
from tests.paxserve.paced_server import running


@pytest.fixture
def server():
    with running() as paced:
        yield paced


def test_a_random_load_is_measured_saved_and_drawn(server, tmp_path, capsys):
    saved, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = [
        "--num-prompts",
        "4",
        "--random-input-len",
        "8",
        "--random-output-len",
        "3",
        "--random-prefix-len",
        "2",
    ]
    results = ["--save-result", str(saved), "--plot", str(drawn)]
    assert cli.main(["bench", "serve", "--base-url", server.root + "/v1", *arguments, *results, "--ignore-eos"]) == 0
    result = json.loads(saved.read_text())
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (4, 40, 12)
    assert (result["model"], result["request_rate"], len(result["ttfts"])) == ("paced", "inf", 4)
    assert "4 succeeded, 0 failed" in capsys.readouterr().out
    assert drawn.read_text().startswith("<?xml")
    trial, *measured = server.bodies
    assert trial["prompt"] == next(b["prompt"] for b in measured if b["prompt"][-1] == trial["prompt"][0])[::-1]
    assert all(body["ignore_eos"] for body in server.bodies)


def test_a_file_of_prompts_and_its_failures(server, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [13, 1], "max_tokens": 2}\n')
    assert cli.main(["bench", "serve", "--base-url", server.root, "--dataset", str(rows), "--output-len", "2"]) == 1
    printed = capsys.readouterr()
    assert "1 succeeded, 1 failed" in printed.out
    assert printed.err == "failed: 1 x HTTP 400: Thirteen.\n"
    assert {body["max_tokens"] for body in server.bodies} == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--endpoint", "/v1/chat/completions"], "takes text"),
        (["--model", "other"], "No such model"),
        (["--base-url", "localhost:1"], "must be like http://"),
        (["--dataset", "none.jsonl"], "Cannot read"),
        (["--request-rate", "-1"], "request rate"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(arguments, words, server, capsys):
    assert cli.main(["bench", "serve", "--base-url", server.root, "--num-prompts", "1", *arguments]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


def test_a_workload_prints_json_and_never_repeats_a_first_token(server, tmp_path, capsys):
    file = tmp_path / "workload.json"
    prompts = [{"prompt_ids": [1, n, n], "max_tokens": 3} for n in range(4)]
    file.write_text(json.dumps({"W1": {"requests": prompts}, "W3": {"unit_gaps": [0.1, 0.1, 0.1, 0.1]}}))
    command = ["bench", "workload", "W1", "--base-url", server.root, "--file", str(file), "--seed", "1"]
    assert cli.main([*command, "--repeats", "2", "--prime", "--server-pid", str(os.getpid())]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first.keys() == second.keys()
    assert (first["completed"], first["failed"], first["output_tokens"]) == (4, 0, 12)
    assert first["output_tokens_per_s"] == pytest.approx(12 / first["duration_s"], rel=0.01)
    assert first["peak_memory_gib"] > 0.01
    warm_up, *rest = server.bodies
    runs = [rest[:5], rest[5:]]  # each primed with its first prompt
    assert [len({body["prompt"][0] for body in run}) for run in runs] == [1, 1]
    assert len({warm_up["prompt"][0], runs[0][0]["prompt"][0], runs[1][0]["prompt"][0]}) == 3
    assert runs[0][0]["prompt"] == runs[0][1]["prompt"] or runs[0][0]["prompt"] in [b["prompt"] for b in runs[0][1:]]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


def test_w3_arrives_at_the_rate(server, tmp_path, capsys):
    file, saved = tmp_path / "workload.json", tmp_path / "out.json"
    prompts = [{"prompt_ids": [1, n, n], "max_tokens": 1} for n in range(3)]
    file.write_text(json.dumps({"W1": {"requests": prompts}, "W3": {"unit_gaps": [0.5, 1.0, 1.0]}}))
    command = ["bench", "workload", "W3", "--base-url", server.root, "--file", str(file), "--request-rate", "5"]
    assert cli.main([*command, "--save-result", str(saved)]) == 0
    (run,) = json.loads(saved.read_text())["runs"]
    assert run["start_times"] == pytest.approx([0, 0.2, 0.4], abs=0.15)
    assert json.loads(capsys.readouterr().out)["request_rate"] == 5


def test_first_tokens_are_ordinary_words():
    low, high = bench_workload.TOKENS_TO_START_WITH
    assert 100 < low < high < 49_152
