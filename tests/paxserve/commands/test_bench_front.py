import json

import pytest

from paxserve import cli
from tests.small_tokenizers import byte_level_tokenizer


def test_every_token_reaches_a_chunk(tmp_path, capsys):
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    command = ["bench", "front", "--model", str(tmp_path), "--streams", "1", "8", "--tokens", "50"]
    assert cli.main(command) == 0
    one, eight = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["tokens"], eight["tokens"]) == (50, 400)
    # Characters of several bytes take several tokens, and so share a chunk; role, end and close have their own.
    assert 30 < one["chunks"] <= 54
    assert eight["bytes"] > 7 * one["bytes"]
    assert one["tokens_per_cpu_second"] > 0
    assert cli.main([*command, "--stream-interval", "10"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["chunks"] < 12


def test_counts_that_are_none():
    assert cli.main(["bench", "front", "--model", "m", "--tokens", "0"]) == 2


@pytest.mark.parametrize("missing", [["bench", "front"]])
def test_the_model_is_needed(missing):
    with pytest.raises(SystemExit):
        cli.main(missing)
