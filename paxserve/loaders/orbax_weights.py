"""A model's parameters from a converted checkpoint, where they have the model's own names."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from models.layers.axis_layout import AxisLayout
from models.layers.axis_layout import as_stored as whole_axis
from paxserve.loaders.filling import ShardingRule, axes_of
from paxserve.loaders.orbax_folder import OrbaxFolder
from paxserve.loaders.tensor_check import check_tensors


class _Target:
    """One parameter, and the arrays of its layers."""

    def __init__(self, path: tuple, param: nnx.Variable, sharding: ShardingRule | None) -> None:
        self.path, self.param = path, param
        value, metadata = param.get_value(), param.get_metadata()
        self.is_stacked = "layers" in metadata
        names: list[tuple] = [path]
        axes = axes_of(param)
        if self.is_stacked:
            # The number in the path is that of the run of layers.
            first, count = metadata["layers"]
            place = next(index for index, part in enumerate(path) if isinstance(part, int))
            names = [(*path[:place], layer, *path[place + 1 :]) for layer in range(first, first + count)]
            axes = axes[1:]
        shape = value.shape[1:] if self.is_stacked else value.shape
        placement = sharding(axes) if sharding else SingleDeviceSharding(jax.devices()[0])
        target = jax.ShapeDtypeStruct(shape, value.dtype, sharding=placement)
        self.arrays = {parameter_name(name): target for name in names}


def parameter_name(path: tuple) -> str:
    """A parameter's name in a converted checkpoint."""
    return ".".join(map(str, path))


def load_converted(
    abstract: nnx.State,
    checkpoint: OrbaxFolder,
    *,
    stored: nnx.State | None = None,
    sharding: ShardingRule | None = None,
    unused: tuple[str, ...] = (),
) -> nnx.State:
    """The state with its parameters from the checkpoint, cast to their own type.

    `stored` are the parameters as they were converted, layer by layer, where the state's are laid out otherwise: for
    several tensor shards. Those that differ are put together on the host, one layer's parameter at a time.

    Raises `ConfigError` naming every array that is missing, unexpected or of another shape, before any is read.
    """
    plan = [_Target(path, param, sharding) for path, param in nnx.to_flat_state(abstract)]
    as_stored = {parameter_name(path): param for path, param in nnx.to_flat_state(stored)} if stored else {}
    wanted = {name: target.shape for item in plan for name, target in item.arrays.items()}
    wanted |= {name: param.get_value().shape for name, param in as_stored.items()}
    check_tensors(checkpoint, wanted, unused=unused)

    def restore(items: Sequence[_Target]) -> dict[str, jax.Array]:
        moved = {id(item): _moved_axes(item, as_stored) for item in items}
        direct = {name: t for item in items if moved[id(item)] is None for name, t in item.arrays.items()}
        arrays = checkpoint.restore(direct) if direct else {}
        for item in items:
            if (layouts := moved[id(item)]) is not None:
                arrays |= {name: _spread(checkpoint.read(name), t, layouts) for name, t in item.arrays.items()}
        return arrays

    apart = [item for item in plan if not item.is_stacked]
    # All at once, so that the store reads them together; stacks one by one, so that only one is there twice.
    restored = restore(apart)
    filled = [(item.path, item.param.replace(restored[parameter_name(item.path)])) for item in apart]
    for item in plan:
        if item.is_stacked:
            layers = restore([item])
            filled.append((item.path, item.param.replace(jnp.stack([layers[name] for name in item.arrays]))))
    return nnx.from_flat_state(filled)


def _moved_axes(item: _Target, as_stored: Mapping[str, nnx.Variable]) -> list[AxisLayout] | None:
    """Where the entries of each axis of a parameter are in the array that was stored; None where they are in place."""
    name, target = next(iter(item.arrays.items()))
    if name not in as_stored:
        return None
    stored = as_stored[name]
    wanted = _layouts(item.param, target.shape)
    given = _layouts(stored, stored.get_value().shape)
    return None if wanted == given else [own.within(other) for own, other in zip(wanted, given, strict=True)]


def _layouts(param: nnx.Variable, shape: tuple[int, ...]) -> list[AxisLayout]:
    layouts = param.get_metadata().get("layouts", (None,) * len(shape))
    return [layout or whole_axis(size) for layout, size in zip(layouts, shape, strict=True)]


def _spread(array: np.ndarray, target: jax.ShapeDtypeStruct, layouts: list[AxisLayout]) -> jax.Array:
    """The array rearranged, each device's shard put together by itself."""

    def shard(place: Any) -> np.ndarray:
        bounds = [part.indices(size)[:2] for part, size in zip(place, target.shape, strict=True)]
        host = np.zeros([stop - start for start, stop in bounds], target.dtype)
        runs = [list(layout.runs(*bound)) for layout, bound in zip(layouts, bounds, strict=True)]
        for combination in itertools.product(*runs):
            if all(run.source is not None for run in combination):
                put = tuple(slice(run.target, run.target + run.size) for run in combination)
                taken = tuple(slice(run.source, run.source + run.size) for run in combination)  # type: ignore[operator]
                host[put] = array[taken]
        return host

    return jax.make_array_from_callback(target.shape, target.sharding, shard)
