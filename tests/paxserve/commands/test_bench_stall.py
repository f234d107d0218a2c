import json

import pytest

from paxserve import cli
from paxserve.bench import stall


def test_one_line_for_each_budget(monkeypatch, capsys):
    asked = []

    def measure(flags, budget, prompt_len, repeats):
        asked.append((flags, budget, prompt_len, repeats))
        return {"budget": budget or "off"}

    monkeypatch.setattr(stall, "measure_stall", measure)
    command = ["bench", "stall", "--model", "m", "--budgets", "8", "off", "--prompt-len", "50", "--repeats", "2"]
    assert cli.main([*command, "--block-size", "4"]) == 0
    assert [json.loads(line)["budget"] for line in capsys.readouterr().out.splitlines()] == [8, "off"]
    flags = {"model": "m", "block_size": 4}
    assert asked == [(flags, 8, 50, 2), (flags, None, 50, 2)]


@pytest.mark.parametrize("arguments", [["--budgets", "1"], ["--budgets", "many"], ["--repeats", "0"]])
def test_arguments_that_are_refused(arguments, capsys):
    assert cli.main(["bench", "stall", "--model", "m", *arguments]) == 2
    assert "must be" in capsys.readouterr().err
