"""The made-up checkpoint is one that loads, in shards and converted, and its loads are measured."""

import json

from paxserve.bench import loading
from paxserve.config import ModelConfig
from paxserve.conversion import convert

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_a_made_up_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "SHAPE", loading.SHAPE | SMALL | {"vocab_size": 256})
    monkeypatch.setattr(loading, "SHARD_BYTES", 100_000)
    (tmp_path / "plain").mkdir()
    size = loading.write_checkpoint(tmp_path / "plain", 400_000)
    assert 350_000 < size < 450_000
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 4
    convert(ModelConfig(model=str(tmp_path / "plain")), tmp_path / "converted")
    for name in ("plain", "converted"):
        settings = ModelConfig(model=str(tmp_path / name))
        result = loading.measure_load(settings, dtype="bfloat16", layer_execution="looped")
        assert result["weight_bytes"] == size
        assert result["seconds"] > 0
        assert result["extra_bytes"] < 1 << 30
