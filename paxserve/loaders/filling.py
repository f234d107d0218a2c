"""How one parameter of a model is put together from a checkpoint's tensors."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from models.layers.weight_map import LoadMap
from paxserve.loaders.checkpoint import Checkpoint

TILE_ROWS = 64

ShardingRule = Callable[[tuple[str | None, ...]], Sharding]


def axes_of(param: nnx.Variable) -> tuple[str | None, ...]:
    """The logical names of a parameter's axes."""
    return param.get_metadata("out_sharding")


class Filling:
    """One parameter, the layers that it holds, and the tensors that fill it."""

    def __init__(self, path: tuple[Any, ...], param: nnx.Variable, load_map: LoadMap) -> None:
        self.path, self.param = path, param
        self.key = ".".join("*" if isinstance(part, int) else part for part in path)
        assert self.key in load_map, f"no line for {self.key} in load_map"
        self.source = load_map[self.key]
        metadata = param.get_metadata()
        numbers = [part for part in path if isinstance(part, int)]
        self.is_stacked = "layers" in metadata
        if self.is_stacked:
            first, count = metadata["layers"]
            numbers = list(range(first, first + count))
        self.layers: list[int | None] = list(numbers) or [None]
        self.target = param.get_value()
        self.shape = self.target.shape[1:] if self.is_stacked else self.target.shape
        # A second star counts the entries of the first axis (heads, experts), each with tensors of its own.
        self.has_entries = self.source.names[0].count("*") == 2
        self.entry_shape = self.shape[1:] if self.has_entries else self.shape
        parts, self.groups = metadata.get("parts"), metadata.get("groups", 1)
        if not parts or self.source.is_dealt:
            parts, self.groups = (self.shape[-1],), 1
        self.parts: tuple[int, ...] = parts

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that is wanted, with the shape that it must have."""
        widths = self.parts if len(self.source.names) > 1 else (sum(self.parts),)
        *others, _ = self.entry_shape
        # A matrix is [in, out], perhaps behind an axis of experts; torch stores [out, in].
        before, inner = others[:-1], others[-1:]
        for layer in self.layers:
            for entry in self._entries():
                for name, width in zip(self._names(layer, entry), widths, strict=True):
                    width *= self.source.share[1]
                    yield name, (*before, width, *inner) if self.source.order == "out_in" else (*others, width)

    def prefer_stored(self, names: tuple[str, ...], checkpoint: Checkpoint) -> None:
        """Take `names` instead of the source's own where only they are stored."""
        present = [_numbered(n[0], self.layers[0], 0) in checkpoint.tensors for n in (self.source.names, names)]
        if present == [False, True]:
            self.source = dataclasses.replace(self.source, names=names)

    def load(self, checkpoint: Checkpoint, sharding: ShardingRule | None) -> jax.Array:
        """The parameter on the device."""
        placement = sharding and sharding(axes_of(self.param))
        if not self.is_stacked:
            return jax.device_put(self._assemble(checkpoint, self.layers[0]), placement)
        stack = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=placement)(self.target.shape, self.target.dtype)
        for index, layer in enumerate(self.layers):
            stack = _set_layer(stack, self._assemble(checkpoint, layer), index)
        return stack

    def _entries(self) -> list[int | None]:
        return list(range(self.shape[0])) if self.has_entries else [None]

    def _names(self, layer: int | None, entry: int | None) -> list[str]:
        return [_numbered(name, layer, entry) for name in self.source.names]

    def _assemble(self, checkpoint: Checkpoint, layer: int | None) -> np.ndarray:
        """One layer's parameter on the host."""
        dtype = self.target.dtype
        is_whole = self.source.order == "as_stored" and self.source.share == (0, 1) and len(self.parts) == 1
        if is_whole and not self.has_entries:
            return checkpoint.read(self._names(layer, None)[0]).astype(dtype, copy=False)
        host = np.empty(self.shape, dtype)
        for entry in self._entries():
            part = host if entry is None else host[entry]
            self._fill(checkpoint, self._names(layer, entry), np.moveaxis(part, -1, 0))
        return host

    def _fill(self, checkpoint: Checkpoint, names: list[str], host_rows: np.ndarray) -> None:
        """Fill the last axis, here moved to the front, from the tensors of its parts."""
        first_row = 0
        index, count = self.source.share
        for name in names:
            tensor = checkpoint.read(name)
            rows = np.moveaxis(tensor, -2 if self.source.order == "out_in" else -1, 0)
            if self.source.is_interleaved:
                rows = rows[index::count]
            else:
                rows = rows[index * len(rows) // count : (index + 1) * len(rows) // count]
            self._deal_out(rows, first_row, host_rows)
            first_row += len(rows)

    def _deal_out(self, rows: np.ndarray, first_row: int, host_rows: np.ndarray) -> None:
        """Copy rows of the parts, laid one after another from `first_row` on, to their places among the groups."""
        part_starts = np.cumsum([0, *self.parts])
        for part, size in enumerate(self.parts):
            if not first_row <= part_starts[part] < first_row + len(rows):
                continue
            piece = size // self.groups
            for group in range(self.groups):
                source = part_starts[part] - first_row + group * piece
                target = (group * part_starts[-1] + part_starts[part]) // self.groups
                # Tile by tile, so that both sides of a transposition stay in the processor's cache.
                for start in range(0, piece, TILE_ROWS):
                    stop = min(start + TILE_ROWS, piece)
                    host_rows[target + start : target + stop] = rows[source + start : source + stop]


def _numbered(name: str, layer: int | None, entry: int | None) -> str:
    numbers = iter([layer, entry])
    return re.sub(r"\*", lambda _: str(next(numbers)), name)


@partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, value: jax.Array, index: int) -> jax.Array:
    return stack.at[index].set(value)
