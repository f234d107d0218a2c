"""A checkpoint in the engine's own layout, as `paxserve convert` writes it: Orbax arrays by parameter name.

The arrays are whole and layer by layer, whatever devices and layer execution wrote them, and are read straight into
any sharding. Every layer's parameter is as the engine computes with it: q, k and v fused, matrices [in, out].
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from paxserve.errors import ConfigError
from paxserve.loaders.hf_tokenizer import load_folder_tokenizer
from paxserve.loaders.json_file import read_json_object, read_optional_json_object
from paxserve.loaders.tensor_spec import TensorSpec
from paxserve.loaders.tokenizer import Tokenizer

MARKER = "paxserve_checkpoint.json"
ARRAYS = "arrays"
VERSION = 1


class OrbaxFolder:
    """A converted checkpoint; opening it reads the names and shapes of its arrays only."""

    def __init__(self, path: Path, *, name: str | None = None, with_weights: bool = True) -> None:
        self.path = path
        self.name = name or str(path)
        version = read_json_object(path / MARKER).get("version")
        if version != VERSION:
            raise ConfigError(f"{path} was converted in format {version!r}, this is {VERSION}: convert it again.")
        self.hf_config: dict[str, Any] = read_json_object(path / "config.json")
        self.generation_config: dict[str, Any] = read_optional_json_object(path / "generation_config.json")
        self.tensors: Mapping[str, TensorSpec] = self._read_specs() if with_weights else {}

    def read(self, name: str) -> np.ndarray:
        """One parameter on the host."""
        arguments = ocp.RestoreArgs(restore_type=np.ndarray)
        item = {name: jax.ShapeDtypeStruct(*self.tensors[name])}
        return self._restore(item, {name: arguments})[name]

    def restore(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Parameters on the devices, each in the shape, type and sharding of its target."""
        arguments = {
            name: ocp.ArrayRestoreArgs(dtype=target.dtype, sharding=target.sharding, global_shape=target.shape)
            for name, target in targets.items()
        }
        return self._restore(dict(targets), arguments)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the folder holds."""
        return load_folder_tokenizer(self.path)

    def _restore(self, item: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        largest = max(spec.dtype.itemsize * math.prod(spec.shape) for spec in map(self.tensors.__getitem__, item))
        with self._faults(), _checkpointer(largest) as reader:
            request = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
            return reader.restore(self._arrays, args=request)

    def _read_specs(self) -> dict[str, TensorSpec]:
        with self._faults(), _checkpointer() as reader:
            metadata: Any = reader.metadata(self._arrays)
            return {
                name: TensorSpec(tuple(array.shape), np.dtype(array.dtype))
                for name, array in dict(metadata.item_metadata.tree).items()
            }

    @property
    def _arrays(self) -> Path:
        return (self.path / ARRAYS).absolute()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Whatever Orbax and the store under it raise for damaged files, as an error that names the folder."""
        try:
            yield
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"The arrays in {self._arrays} cannot be read: {reason[0][:300]}") from error


def save_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Write parameters by name for `OrbaxFolder` to read; the folder must not have any yet."""
    orbax_log = logging.getLogger("absl")
    level = orbax_log.level
    orbax_log.setLevel(logging.ERROR)  # it warns that there is nothing to merge
    try:
        with _checkpointer() as writer:
            writer.save((folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(dict(arrays)))
    finally:
        orbax_log.setLevel(level)


def _checkpointer(largest_bytes: int = 0) -> ocp.Checkpointer:
    """Orbax with a file for each array and no compression: both would cost more to undo than the disk saves.

    Restoring, it holds a gigabyte beside the arrays themselves, or the largest of them.
    """
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, restore_concurrent_gb=max(1, -(-largest_bytes // 10**9))
    )
    return ocp.Checkpointer(handler)
