"""Which mesh axis each logical axis of an array lies along: the table that turns names into shardings.

Weights name their axes in the models (`out_sharding` in a parameter's metadata), KV pools in the attention backends.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.mesh import EXPERT, TENSOR

LogicalAxes = tuple[str | None, ...]
"""A name for each axis of an array; None is never split."""

RULES: Mapping[str, str | None] = MappingProxyType(
    {
        "vocab": TENSOR,
        "heads": TENSOR,
        "kv_heads": TENSOR,
        "mlp": TENSOR,
        "rows": TENSOR,
        "expert": EXPERT,
        "whole_expert": TENSOR,
        "embed": None,
        "layers": None,
    }
)
"""Mesh axis by logical axis; `rows` are a step's, when logits are turned round; experts are `whole_expert`s where the
devices that share a layer share them out whole. A new logical axis is a line here."""


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
    """Where an array with these axes is split. Raises `ValueError` for a name without a rule, or two for one axis."""
    unknown = [name for name in axes if name is not None and name not in RULES]
    if unknown:
        raise ValueError(f"no rule for the logical axis {unknown[0]!r}: known are {', '.join(RULES)}.")
    spec = [None if name is None else RULES[name] for name in axes]
    used = [name for name in spec if name is not None]
    if len(set(used)) < len(used):
        raise ValueError(f"two of the axes {axes} lie along one mesh axis: {spec}.")
    return PartitionSpec(*spec)


def weight_sharding(mesh: Mesh, axes: LogicalAxes) -> NamedSharding:
    """The sharding of a weight whose axes have these logical names."""
    return NamedSharding(mesh, partition_spec(axes))


def pool_sharding(mesh: Mesh, kv_head_axis: int) -> NamedSharding:
    """The sharding of every array of a KV pool that has its kv heads on that axis."""
    return weight_sharding(mesh, (*[None] * kv_head_axis, "kv_heads"))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device: the state of request slots, a step's packed inputs and its outputs."""
    return NamedSharding(mesh, PartitionSpec())
