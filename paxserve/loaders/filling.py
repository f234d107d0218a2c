"""How one parameter of a model is put together from a checkpoint's tensors, a device's shard at a time."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from models.layers.axis_layout import AxisLayout, Run, as_stored
from models.layers.weight_map import LoadMap
from paxserve.loaders.checkpoint import Checkpoint

TILE_ROWS = 64

ShardingRule = Callable[[tuple[str | None, ...]], Sharding]

Place = tuple[slice, ...]
"""Part of an array: a range of each axis."""

Read = Callable[[str], np.ndarray]


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
        given = metadata.get("layouts", (None,) * len(self.shape))
        self.is_rearranged = any(given)
        layouts = [layout or as_stored(size) for layout, size in zip(given, self.shape, strict=True)]
        if self.source.is_dealt:
            layouts[-1] = layouts[-1].dealt()
        self.layouts: list[AxisLayout] = layouts

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that is wanted, with the shape that it must have."""
        *others, last = self.layouts[1:] if self.has_entries else self.layouts
        widths = last.parts if len(self.source.names) > 1 else (sum(last.parts),)
        sizes = [sum(layout.parts) for layout in others]
        # A matrix is [in, out], perhaps behind an axis of experts; torch stores [out, in].
        before, inner = sizes[:-1], sizes[-1:]
        for layer in self.layers:
            for entry in range(sum(self.layouts[0].parts)) if self.has_entries else [None]:
                for name, width in zip(self._names(layer, entry), widths, strict=True):
                    width *= self.source.share[1]
                    yield name, (*before, width, *inner) if self.source.order == "out_in" else (*sizes, width)

    def prefer_stored(self, names: tuple[str, ...], checkpoint: Checkpoint) -> None:
        """Take `names` instead of the source's own where only they are stored."""
        present = [_numbered(n[0], self.layers[0], 0) in checkpoint.tensors for n in (self.source.names, names)]
        if present == [False, True]:
            self.source = dataclasses.replace(self.source, names=names)

    def load(self, checkpoint: Checkpoint, sharding: ShardingRule | None) -> jax.Array:
        """The parameter on its devices."""
        axes = axes_of(self.param)
        placement = sharding and sharding(axes)
        if not self.is_stacked:
            return self._load_layer(checkpoint, self.layers[0], placement)
        stack = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=placement)(self.target.shape, self.target.dtype)
        set_layer = _layer_setter(placement)
        of_layer = sharding and sharding(axes[1:])
        for index, layer in enumerate(self.layers):
            stack = set_layer(stack, self._load_layer(checkpoint, layer, of_layer), index)
        return stack

    def _load_layer(self, checkpoint: Checkpoint, layer: int | None, placement: Sharding | None) -> jax.Array:
        """One layer's parameter, sent off a shard at a time: the host holds one, and the tensors that it is made of."""
        read = functools.lru_cache(maxsize=len(self.source.names))(checkpoint.read)
        if placement is None:
            return jax.device_put(self._assemble(read, layer, tuple(slice(0, size) for size in self.shape)))
        places = {
            device: tuple(slice(*part.indices(size)[:2]) for part, size in zip(place or (), self.shape, strict=True))
            for device, place in placement.addressable_devices_indices_map(self.shape).items()
        }
        arrays = []
        by_place = sorted(places, key=lambda device: [part.start for part in places[device]])
        for place, devices in itertools.groupby(by_place, key=places.__getitem__):
            shard = self._assemble(read, layer, place)
            arrays += [jax.device_put(shard, device) for device in devices]
            jax.block_until_ready(arrays[-1])
        return jax.make_array_from_single_device_arrays(self.shape, placement, arrays)

    def _names(self, layer: int | None, entry: int | None) -> list[str]:
        return [_numbered(name, layer, entry) for name in self.source.names]

    def _assemble(self, read: Read, layer: int | None, place: Place) -> np.ndarray:
        """A part of one layer's parameter on the host."""
        dtype = self.target.dtype
        is_whole = self.source.order == "as_stored" and self.source.share == (0, 1)
        if is_whole and not self.is_rearranged and not self.has_entries:
            return read(self._names(layer, None)[0])[place].astype(dtype, copy=False)
        runs = [list(layout.runs(p.start, p.stop)) for layout, p in zip(self.layouts, place, strict=True)]
        is_filled = all(run.source is not None for axis in runs for run in axis)
        host = (np.empty if is_filled else np.zeros)([p.stop - p.start for p in place], dtype)
        if not self.has_entries:
            self._fill(read, self._names(layer, None), np.moveaxis(host, -1, 0), runs)
            return host
        for target, source, size in runs[0]:
            for step in range(size if source is not None else 0):
                rows = np.moveaxis(host[target + step], -1, 0)
                self._fill(read, self._names(layer, source + step), rows, runs[1:])  # type: ignore[operator]
        return host

    def _fill(self, read: Read, names: list[str], host_rows: np.ndarray, runs: list[list[Run]]) -> None:
        """Fill the last axis, here moved to the front, from the tensors of its parts."""
        *others, last = [[run for run in axis if run.source is not None] for axis in runs]
        index, count = self.source.share
        first_row = 0
        for name in names:
            tensor = read(name)
            rows = np.moveaxis(tensor, -2 if self.source.order == "out_in" else -1, 0)
            if self.source.is_interleaved:
                rows = rows[index::count]
            else:
                rows = rows[index * len(rows) // count : (index + 1) * len(rows) // count]
            for run in last:
                for across in itertools.product(*others):
                    _copy(rows, first_row, host_rows, run, across)
            first_row += len(rows)


def _copy(rows: np.ndarray, first_row: int, host_rows: np.ndarray, run: Run, across: tuple[Run, ...]) -> None:
    """Copy what `rows`, which start at `first_row`, have of a run of the first axis and of runs of the others."""
    target, source, size = run
    assert source is not None
    start, stop = max(source, first_row), min(source + size, first_row + len(rows))
    taken = tuple(slice(r.source, r.source + r.size) for r in across)  # type: ignore[operator]
    put = tuple(slice(r.target, r.target + r.size) for r in across)
    # Tile by tile, so that both sides of a transposition stay in the processor's cache.
    for tile in range(start, stop, TILE_ROWS):
        end = min(tile + TILE_ROWS, stop)
        place = target + tile - source
        host_rows[(slice(place, place + end - tile), *put)] = rows[(slice(tile - first_row, end - first_row), *taken)]


def _numbered(name: str, layer: int | None, entry: int | None) -> str:
    numbers = iter([layer, entry])
    return re.sub(r"\*", lambda _: str(next(numbers)), name)


@functools.cache
def _layer_setter(placement: Sharding | None) -> Callable[..., jax.Array]:
    """The program that writes one layer into a stack of them, in place."""
    return jax.jit(lambda stack, value, index: stack.at[index].set(value), donate_argnums=0, out_shardings=placement)
