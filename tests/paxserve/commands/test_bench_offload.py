import json
from pathlib import Path

import pytest

from paxserve import cli
from paxserve.bench import offload


def test_a_folder_and_host_memory_are_given(monkeypatch, capsys, tmp_path):
    asked = []

    def measure(flags, prompt_len, rounds):
        assert Path(flags.pop("kv_offloading_disk_path")).parent == tmp_path
        asked.append((flags, prompt_len, rounds))
        return {"device_ms": 1.0}

    monkeypatch.setattr(offload, "measure_offload", measure)
    command = ["bench", "offload", "--model", "m", "--prompt-len", "50", "--rounds", "2", "--folder", str(tmp_path)]
    assert cli.main([*command, "--block-size", "4"]) == 0
    assert json.loads(capsys.readouterr().out) == {"device_ms": 1.0}
    assert cli.main([*command, "--kv-offloading-size", "0.5"]) == 0
    flags = {"model": "m", "block_size": 4, "kv_offloading_size": 1.0}
    assert asked == [(flags, 50, 2), ({"model": "m", "kv_offloading_size": 0.5}, 50, 2)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--prompt-len", "1"]])
def test_arguments_that_are_refused(arguments, capsys):
    assert cli.main(["bench", "offload", "--model", "m", *arguments]) == 2
    assert "must be" in capsys.readouterr().err
