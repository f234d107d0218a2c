import json

from paxserve import cli


def test_every_phase_is_measured(capsys):
    assert cli.main(["bench", "host", "--rows", "1", "20", "--steps", "3"]) == 0
    one, many = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (one["rows"], many["rows"]) == (1, 20)
    phases = ("schedule_ms", "pack_ms", "update_ms")
    assert all(result[phase] > 0 for result in (one, many) for phase in (*phases, "message_ms"))
    assert abs(many["schedule_pack_update_ms"] - sum(many[phase] for phase in phases)) < 0.001


def test_arguments_that_are_refused(capsys):
    assert cli.main(["bench", "host", "--rows", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
