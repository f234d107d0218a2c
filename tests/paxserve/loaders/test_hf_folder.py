import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paxserve.errors import ConfigError
from paxserve.loaders.hf_folder import HfFolder
from tests.paxserve.loaders.tiny_checkpoints import write_hf_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = write_hf_folder(tmp_path / "sharded", weights=False)
    save_file({"a": np.zeros((2,), np.float32)}, path / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones((3,), np.float32)}, path / "model-00002-of-00002.safetensors")
    set_weight_map(path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return path


def set_weight_map(path: Path, weight_map: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_config_and_tensors(folder):
    checkpoint = HfFolder(folder, name="org/model")
    assert checkpoint.name == "org/model"
    assert checkpoint.hf_config["hidden_size"] == 4
    assert checkpoint.generation_config == {}
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.tensors["a"].shape == (2, 3)
    np.testing.assert_array_equal(checkpoint.read("b"), np.arange(4))


def test_generation_config(folder):
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert HfFolder(folder).generation_config == {"temperature": 0.6, "eos_token_id": [1, 2]}


def test_shards(sharded):
    checkpoint = HfFolder(sharded)
    assert set(checkpoint.tensors) == {"a", "b"}
    np.testing.assert_array_equal(checkpoint.read("b"), np.ones(3))


def test_shards_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert set(HfFolder(sharded).tensors) == {"a", "b"}


def test_one_tensor_in_two_files(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"a": np.zeros((2,), np.float32)}, sharded / "model-00003.safetensors")
    with pytest.raises(ConfigError, match="Tensor a is both in"):
        HfFolder(sharded)


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names the shard model-00002-of-00002\.safetensors, which is missing"):
        HfFolder(sharded)


def test_tensor_missing_from_its_shard(sharded):
    shard = "model-00001-of-00002.safetensors"
    set_weight_map(sharded, {"a": shard, "c": shard})
    with pytest.raises(ConfigError, match=r"Tensor c is missing from .*model-00001-of-00002\.safetensors"):
        HfFolder(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_unusable_index(sharded, weight_map):
    set_weight_map(sharded, weight_map)
    with pytest.raises(ConfigError, match="must map tensor names to files"):
        HfFolder(sharded)


def test_index_may_not_lead_out_of_the_folder(sharded):
    set_weight_map(sharded, {"a": "../model.safetensors"})
    with pytest.raises(ConfigError, match="not in the same folder"):
        HfFolder(sharded)


def test_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        HfFolder(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match=r"It holds a \.gguf file"):
        HfFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[]", "must hold a JSON object, got list"),
    ],
)
def test_unreadable_config(folder, content, message):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json {message}"):
        HfFolder(folder)


def test_pickle_is_refused(tmp_path):
    path = write_hf_folder(tmp_path / "model", weights=False)
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin: paxserve never loads pickle .* Convert"):
        HfFolder(path)


def test_no_weights(tmp_path):
    path = write_hf_folder(tmp_path / "model", weights=False)
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        HfFolder(path)
    assert HfFolder(path, with_weights=False).tensors == {}


def test_consolidated_weights_are_left_out(folder):
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    save_file({"z": np.zeros((1,), np.float32)}, folder / "weights.safetensors")
    assert set(HfFolder(folder).tensors) == {"z"}
