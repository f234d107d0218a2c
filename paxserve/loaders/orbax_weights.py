"""A model's parameters from a converted checkpoint, where they have the model's own names."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from paxserve.errors import ConfigError
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
    tensor_shards: int = 1,
    sharding: ShardingRule | None = None,
    unused: tuple[str, ...] = (),
) -> nnx.State:
    """The state with its parameters from the checkpoint, cast to their own type.

    Raises `ConfigError` naming every array that is missing, unexpected or of another shape, before any is read.
    """
    if tensor_shards != 1:
        raise ConfigError(
            f"{checkpoint.name}: converted checkpoints have heads unpadded, so that they cannot be spread over "
            f"{tensor_shards} tensor shards yet. Use the checkpoint that was converted."
        )
    plan = [_Target(path, param, sharding) for path, param in nnx.to_flat_state(abstract)]
    wanted = {name: target.shape for item in plan for name, target in item.arrays.items()}
    check_tensors(checkpoint, wanted, unused=unused)
    apart = [item for item in plan if not item.is_stacked]
    # All at once, so that the store reads them together; stacks one by one, so that only one is there twice.
    restored = checkpoint.restore({name: t for item in apart for name, t in item.arrays.items()})
    filled = [(item.path, item.param.replace(restored[parameter_name(item.path)])) for item in apart]
    for item in plan:
        if item.is_stacked:
            layers = checkpoint.restore(item.arrays)
            filled.append((item.path, item.param.replace(jnp.stack([layers[name] for name in item.arrays]))))
    return nnx.from_flat_state(filled)
