import json

import pytest

from paxserve import cli


def test_pages_saved_grow_with_the_outputs_and_beams_save_more(capsys):
    command = ["bench", "sharing", "--dataset", "alpaca", "--outputs", "1", "2", "4", "--num-prompts", "12"]
    assert cli.main(command) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["beam_search"], r["outputs"]) for r in results] == [(b, n) for b in (False, True) for n in (1, 2, 4)]
    saved = [result["saved_share"] for result in results]
    assert saved[0] == saved[3] == 0
    assert 0.02 < saved[1] < saved[2] < 0.25
    assert saved[1] < saved[4] < 0.5
    assert saved[2] < saved[5] < 0.75
    copied = [result["copied_pages_per_100_tokens"] for result in results]
    assert copied[0] == copied[3] == 0
    assert min(copied[1:3] + copied[4:]) > 0


@pytest.mark.parametrize(("flag", "value"), [("--outputs", "0"), ("--outputs", "129"), ("--num-prompts", "0")])
def test_arguments_that_are_refused(capsys, flag, value):
    assert cli.main(["bench", "sharing", flag, value]) == 2
    assert flag in capsys.readouterr().err
