import json

from paxserve import cli


def test_every_phase_is_measured(capsys):
    assert cli.main(["bench", "host", "--rows", "1", "20", "--steps", "3"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [(result["rows"], result["changing"]) for result in results]
    assert kinds == [(1, False), (1, True), (20, False), (20, True)]
    phases = ("schedule_ms", "pack_ms", "update_ms")
    assert all(result[phase] > 0 for result in results for phase in (*phases, "message_ms"))
    for result in results:
        assert abs(result["schedule_pack_update_ms"] - sum(result[phase] for phase in phases)) < 0.001


def test_arguments_that_are_refused(capsys):
    assert cli.main(["bench", "host", "--rows", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
