"""The one view of a model's files that the rest of the engine has, whatever they are stored as.

Every fault that can be seen without reading the weights (a missing shard, a truncated file, an unknown
architecture) raises `ConfigError` in `open_checkpoint`, before any large memory is taken.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paxserve.config import ModelConfig
from paxserve.errors import ConfigError
from paxserve.loaders.demo_model import DEMO_MODEL_ALIAS, demo_model_path
from paxserve.loaders.gguf_checkpoint import GgufCheckpoint
from paxserve.loaders.hf_folder import HfFolder
from paxserve.loaders.hf_tokenizer import load_folder_tokenizer
from paxserve.loaders.hub import download_snapshot
from paxserve.loaders.tensor_spec import TensorSpec
from paxserve.loaders.tokenizer import Tokenizer

__all__ = ["Checkpoint", "TensorSpec", "open_checkpoint", "open_tokenizer"]


CONVERTED_MARKER = "paxserve_checkpoint.json"
"""The file that tells a folder of `paxserve convert` (`orbax_folder.MARKER`)."""


class Checkpoint(Protocol):
    """A model's configuration, weights by Hugging Face name, and tokenizer."""

    @property
    def path(self) -> Path:
        """The folder or file that it is read from."""
        ...

    @property
    def name(self) -> str:
        """The model as the user gave it."""
        ...

    @property
    def hf_config(self) -> dict[str, Any]:
        """The architecture, with config.json's keys."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """Default sampling values, with generation_config.json's keys; {} if there are none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Shape and type of every tensor; empty with load_format=dummy."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, perhaps a read-only view of a mapped file; safe to call from several threads."""
        ...

    def load_tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer."""
        ...


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """The checkpoint that `config.model` names, its headers read and checked."""
    with_weights = config.load_format != "dummy"
    path = _local_path(config, with_weights=with_weights)
    is_gguf = path.is_file()
    if is_gguf and config.load_format == "safetensors":
        raise ConfigError(f"load_format is safetensors, but {config.model} is a GGUF file.")
    if not is_gguf and config.load_format == "gguf":
        raise ConfigError(f"load_format is gguf, but {config.model} is not a .gguf file: give the file's path.")
    is_converted = (path / CONVERTED_MARKER).is_file()
    if is_converted and config.load_format == "safetensors":
        raise ConfigError(f"load_format is safetensors, but {config.model} was converted to Orbax.")
    if not is_converted and config.load_format == "orbax":
        raise ConfigError(f"load_format is orbax, but {config.model} is no folder that `paxserve convert` has written.")
    checkpoint: Checkpoint
    if is_converted:
        from paxserve.loaders.orbax_folder import (
            OrbaxFolder,
        )  # late: the server's front must not wait for jax and Orbax

        checkpoint = OrbaxFolder(path, name=config.model, with_weights=with_weights)
    elif is_gguf:
        checkpoint = GgufCheckpoint(path, name=config.model, with_weights=with_weights)
    else:
        checkpoint = HfFolder(path, name=config.model, with_weights=with_weights)
    checkpoint.hf_config.update(config.hf_overrides)
    return checkpoint


def open_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer of `config.tokenizer`, or else of the model, without looking at weights."""
    source = config
    if config.tokenizer not in (None, config.model):
        source = dataclasses.replace(config, model=config.tokenizer, revision=None)
    path = _local_path(source, with_weights=False)
    if path.is_file():
        return GgufCheckpoint(path, with_weights=False).load_tokenizer()
    return load_folder_tokenizer(path)


def _local_path(config: ModelConfig, *, with_weights: bool) -> Path:
    if config.model == DEMO_MODEL_ALIAS:
        return demo_model_path()
    path = Path(config.model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"{config.model} is a file but not a .gguf file: give its folder, if it is a checkpoint's."
            )
        return path
    looks_like_path = config.model.startswith(("/", ".", "~")) or config.model.count("/") > 1 or path.suffix == ".gguf"
    if looks_like_path:
        raise ConfigError(f"There is no folder or file {config.model}.")
    return download_snapshot(
        config.model,
        revision=config.revision,
        token=config.hf_token,
        cache_dir=config.download_dir,
        with_weights=with_weights,
    )
