import os
import subprocess
import sys
from pathlib import Path

import pytest

from paxserve.config import ModelConfig
from paxserve.errors import ConfigError
from paxserve.loaders import checkpoint as checkpoint_module
from paxserve.loaders.checkpoint import CONVERTED_MARKER, open_checkpoint, open_tokenizer
from paxserve.loaders.gguf_checkpoint import GgufCheckpoint
from paxserve.loaders.hf_folder import HfFolder
from paxserve.loaders.orbax_folder import MARKER
from tests.paxserve.loaders.tiny_checkpoints import TOKENS, write_hf_folder, write_llama_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_folder(tmp_path):
    folder = write_hf_folder(tmp_path / "m")
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    assert isinstance(checkpoint, HfFolder)
    assert checkpoint.name == str(folder)
    assert set(checkpoint.tensors) == {"a", "b"}


def test_gguf_file(tmp_path):
    path = write_llama_gguf(tmp_path / "m.gguf")
    for load_format in ("auto", "gguf"):
        checkpoint = open_checkpoint(ModelConfig(model=str(path), load_format=load_format))
        assert isinstance(checkpoint, GgufCheckpoint)
        assert checkpoint.tensors


def test_demo_alias(tmp_path, monkeypatch):
    path = write_llama_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(checkpoint_module, "demo_model_path", lambda: path)
    checkpoint = open_checkpoint(ModelConfig(model="smollm2-135m-instruct"))
    assert checkpoint.name == "smollm2-135m-instruct"


def test_dummy_needs_no_weights(tmp_path):
    folder = write_hf_folder(tmp_path / "m", weights=False)
    assert open_checkpoint(ModelConfig(model=str(folder), load_format="dummy")).tensors == {}
    path = write_llama_gguf(tmp_path / "m.gguf")
    dummy = open_checkpoint(ModelConfig(model=str(path), load_format="dummy"))
    assert dummy.tensors == {}
    assert dummy.hf_config["vocab_size"] == len(TOKENS)


def test_load_format_must_fit(tmp_path):
    path, folder = write_llama_gguf(tmp_path / "m.gguf"), write_hf_folder(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"load_format is safetensors, but .* is a GGUF file"):
        open_checkpoint(ModelConfig(model=str(path), load_format="safetensors"))
    with pytest.raises(ConfigError, match="load_format is gguf, but"):
        open_checkpoint(ModelConfig(model=str(folder), load_format="gguf"))


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "a/b/c", "org/model.gguf", "~/none-at-all"])
def test_no_such_path(model):
    with pytest.raises(ConfigError, match=f"There is no folder or file {model}"):
        open_checkpoint(ModelConfig(model=model))


def test_file_of_another_kind(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"is a file but not a \.gguf file"):
        open_checkpoint(ModelConfig(model=str(tmp_path / "model.safetensors")))


def test_tokenizer_of_another_source(tmp_path):
    path, folder = write_llama_gguf(tmp_path / "m.gguf"), write_hf_folder(tmp_path / "m")
    tokenizer = open_tokenizer(ModelConfig(model=str(folder), tokenizer=str(path)))
    assert tokenizer.encode("ab") == [TOKENS.index("ab")]
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        open_tokenizer(ModelConfig(model=str(folder)))


def open_offline(cache: Path, model: str, *, revision: str | None = None) -> subprocess.CompletedProcess[str]:
    """Open a hub name in a fresh process: huggingface_hub reads HF_HUB_OFFLINE when it is imported."""
    script = (
        "import sys; from paxserve.config import ModelConfig; from paxserve.errors import ConfigError\n"
        "from paxserve.loaders.checkpoint import open_checkpoint\n"
        f"config = ModelConfig(model={model!r}, revision={revision!r}, download_dir={str(cache)!r})\n"
        "try: c = open_checkpoint(config)\n"
        "except ConfigError as error: sys.exit(f'ConfigError: {error}')\n"
        "print(c.name, sorted(c.tensors))\n"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)


@pytest.fixture
def hub_cache(tmp_path) -> Path:
    """A hub cache that holds org/tiny at its branch main."""
    repo = tmp_path / "hub" / "models--org--tiny"
    write_hf_folder(repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def test_hub_name_from_the_cache(hub_cache):
    done = open_offline(hub_cache, "org/tiny")
    assert (done.stdout, done.returncode) == ("org/tiny ['a', 'b']\n", 0), done.stderr


def test_hub_revision_that_is_not_cached(hub_cache):
    done = open_offline(hub_cache, "org/tiny", revision="v2")
    assert done.returncode == 1
    assert "ConfigError: Cannot get 'org/tiny' at revision v2: it is no local folder" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr


def test_hub_name_that_is_not_cached(hub_cache):
    done = open_offline(hub_cache, "nobody/nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: Cannot get 'nobody/nothing': it is no local folder or .gguf file")


def test_bad_hub_name():
    with pytest.raises(ConfigError, match=r"Cannot get 'org/na me'.*HFValidationError"):
        open_checkpoint(ModelConfig(model="org/na me"))


def test_converted_folders_are_known_by_their_own_file():
    assert CONVERTED_MARKER == MARKER
