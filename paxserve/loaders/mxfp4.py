"""MXFP4 tensors (OCP Microscaling formats 1.0), made whole while they are loaded: gpt-oss stores its experts so.

Such a tensor is two: `NAME_blocks` with two 4-bit floats a byte, the low half first, and `NAME_scales` with a power of
two for every 32 of them. Together they are matrices [..., out, in]; like transformers, this gives [..., in, out].
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import Checkpoint
from paxserve.loaders.tensor_spec import TensorSpec
from paxserve.loaders.tokenizer import Tokenizer

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
SCALE_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPE = np.dtype(ml_dtypes.bfloat16)  # holds every product of a 4-bit float and a scale


class Mxfp4Checkpoint:
    """A checkpoint whose MXFP4 tensors look like bfloat16 ones; all others are as they were."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        stored = checkpoint.tensors
        self._names = {n.removesuffix(BLOCKS) for n in stored if n.endswith(BLOCKS)}
        self.path, self.name = checkpoint.path, checkpoint.name
        halves = {name + suffix for name in self._names for suffix in (BLOCKS, SCALES)}
        self.tensors: Mapping[str, TensorSpec] = {n: spec for n, spec in stored.items() if n not in halves} | {
            name: TensorSpec(self._shape(name), DTYPE) for name in self._names
        }

    @property
    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's own."""
        return self._checkpoint.hf_config

    @property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's own."""
        return self._checkpoint.generation_config

    def read(self, name: str) -> np.ndarray:
        """A tensor; an MXFP4 one is computed at each call and takes its whole size in memory."""
        if name not in self._names:
            return self._checkpoint.read(name)
        return dequantize(self._checkpoint.read(name + BLOCKS), self._checkpoint.read(name + SCALES)).swapaxes(-1, -2)

    def load_tokenizer(self) -> Tokenizer:
        """The checkpoint's own."""
        return self._checkpoint.load_tokenizer()

    def _shape(self, name: str) -> tuple[int, ...]:
        stored = self._checkpoint.tensors
        blocks, scales = stored[name + BLOCKS], stored.get(name + SCALES)
        expected = TensorSpec(blocks.shape[:-1], np.dtype(np.uint8))
        if scales != expected or blocks.dtype != np.uint8 or blocks.shape[-1] != BLOCK_BYTES or len(blocks.shape) < 3:
            raise ConfigError(
                f"{self.name}: {name + BLOCKS} must be bytes [..., out, blocks, {BLOCK_BYTES}] with {name + SCALES} of "
                f"as many blocks, got {blocks} and {scales}."
            )
        *before, out_size, num_blocks, _ = blocks.shape
        return (*before, num_blocks * 2 * BLOCK_BYTES, out_size)


def with_whole_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, its MXFP4 tensors made whole if it has any."""
    return Mxfp4Checkpoint(checkpoint) if any(name.endswith(BLOCKS) for name in checkpoint.tensors) else checkpoint


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., B, 16] bytes and [..., B] scales as [..., 32 B] bfloat16 numbers, exactly."""
    values = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
    codes = np.arange(256)
    pairs = np.stack([values[codes & 15], values[codes >> 4]], axis=-1)  # of every byte
    out = np.empty((*blocks.shape, 2), DTYPE)
    # Matrix by matrix, so that float32 is never held of more than one.
    for index in np.ndindex(blocks.shape[:-3]):
        factors = np.ldexp(np.float32(1), scales[index].astype(np.int32) - SCALE_BIAS)
        out[index] = pairs[blocks[index]] * factors[..., None, None]
    return out.reshape(*blocks.shape[:-2], -1)
