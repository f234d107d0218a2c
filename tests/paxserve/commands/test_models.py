import json
from pathlib import Path

import pytest

from models import architectures
from paxserve.cli import main

GOLDENS = Path(__file__).parents[2] / "goldens"


def test_every_family_is_listed(capsys):
    assert main(["models", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert list(table) == architectures()
    assert "qwen3" in table["qwen3"]["goldens"]
    assert table["bert"]["real"] == ["all-minilm-l6-v2"]
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in architectures())


@pytest.mark.parametrize("model", ["xlm-roberta", str(GOLDENS / "pooling" / "xlm_roberta")])
def test_one_family(capsys, model):
    assert main(["models", model, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["xlm_roberta"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen33", "closest one is qwen3."),
        (str(GOLDENS), "no config.json with a model_type"),
        ("inputs", "not supported"),
    ],
)
def test_what_cannot_be_run(capsys, model, message):
    assert main(["models", model]) == 2
    assert message in capsys.readouterr().err
