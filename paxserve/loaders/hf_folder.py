"""A folder as Hugging Face lays it out: config.json, safetensors (perhaps sharded), tokenizer files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.errors import ConfigError
from paxserve.loaders.hf_tokenizer import load_folder_tokenizer
from paxserve.loaders.json_file import read_json_object, read_optional_json_object
from paxserve.loaders.safetensors_file import SafetensorsFile
from paxserve.loaders.tensor_spec import TensorSpec
from paxserve.loaders.tokenizer import Tokenizer

INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}


class HfFolder:
    """A checkpoint folder; opening it reads and checks every header, and no tensor."""

    def __init__(self, path: Path, *, name: str | None = None, with_weights: bool = True) -> None:
        self.path = path
        self.name = name or str(path)
        if not (path / "config.json").is_file():
            hint = " It holds a .gguf file: give that file's path." if any(path.glob("*.gguf")) else ""
            raise ConfigError(f"{path} has no config.json, so it is no Hugging Face checkpoint.{hint}")
        self.hf_config: dict[str, Any] = read_json_object(path / "config.json")
        self.generation_config: dict[str, Any] = read_optional_json_object(path / "generation_config.json")
        self._file_of: dict[str, SafetensorsFile] = self._open_weights() if with_weights else {}
        self.tensors: Mapping[str, TensorSpec] = {n: file.tensors[n] for n, file in self._file_of.items()}

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as a read-only view of its mapped file."""
        return self._file_of[name].read(name)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the folder holds."""
        return load_folder_tokenizer(self.path)

    def _open_weights(self) -> dict[str, SafetensorsFile]:
        if (self.path / INDEX_NAME).is_file():
            return self._open_shards(self.path / INDEX_NAME)
        whole = self.path / "model.safetensors"
        # Mistral repeats its weights under other names in consolidated*.safetensors; adapters are no base model.
        skipped = ("consolidated", "adapter_")
        paths = [whole] if whole.exists() else sorted(self.path.glob("*.safetensors"))
        paths = [path for path in paths if not path.name.startswith(skipped)]
        if not paths:
            raise ConfigError(self._no_weights_message())
        file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, paths):
            for name in file.tensors:
                if name in file_of:
                    raise ConfigError(f"Tensor {name} is both in {file_of[name].path} and in {file.path}.")
                file_of[name] = file
        return file_of

    def _open_shards(self, index_path: Path) -> dict[str, SafetensorsFile]:
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ConfigError(f"{index_path} must map tensor names to files under weight_map.")
        files: dict[str, SafetensorsFile] = {}
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise ConfigError(f"{index_path} names the file {shard!r}, which is not in the same folder.")
            if not (self.path / shard).exists():
                raise ConfigError(f"{index_path} names the shard {shard}, which is missing from {self.path}.")
            files[shard] = SafetensorsFile(self.path / shard)
        for name, shard in weight_map.items():
            if name not in files[shard].tensors:
                raise ConfigError(f"Tensor {name} is missing from {self.path / shard}, where {INDEX_NAME} puts it.")
        return {name: files[shard] for name, shard in weight_map.items()}

    def _no_weights_message(self) -> str:
        pickles = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickles:
            return (
                f"{self.path} has no *.safetensors, only {', '.join(pickles[:3])}: paxserve never loads pickle files, "
                "which can run code. Convert the weights to safetensors first."
            )
        return f"{self.path} has no *.safetensors file (load_format=dummy needs none)."
