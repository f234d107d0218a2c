"""How parameters come into being: shape, type, logical axes, and how a checkpoint has them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.layers.axis_layout import AxisLayout, padded

RANDOM_SCALE = 0.02

PADDED_AXES = ("vocab", "mlp", "whole_expert")
"""Axes that are filled up with zeros where they do not divide among the tensor shards: zeros there add nothing."""


# Compiled, so that the parameters of alike layers trace once: a model of thirty layers has hundreds.
@partial(jax.jit, static_argnames=("shape", "dtype", "constant"))
def fill(
    key: jax.Array, index: int | jax.Array, *, shape: tuple[int, ...], dtype: DTypeLike, constant: float | None
) -> jax.Array:
    """Values of parameter `index`: random for a matrix, `constant` everywhere where one is given (norms, biases)."""
    if constant is not None:
        return jnp.full(shape, constant, dtype)
    key = jax.random.fold_in(key, index)
    return (RANDOM_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


class Initializer:
    """Makes the parameters of one model, all of one type; run it under `nnx.eval_shape` to take no memory."""

    def __init__(self, dtype: DTypeLike, rngs: nnx.Rngs, tensor_shards: int = 1) -> None:
        self.dtype = jnp.dtype(dtype)
        self.tensor_shards = tensor_shards
        self._key = rngs.params()
        self._num_made = 0

    def param(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        constant: float | None = None,
        layouts: Sequence[AxisLayout | None] = (),
        dtype: DTypeLike | None = None,
    ) -> nnx.Param:
        """A parameter of a shape, as the checkpoint has it, with a logical name for each axis.

        It is of the model's type or, where that is too coarse, of its own.

        `layouts` has an entry for each axis, None where the axis is the checkpoint's own but for padding.
        """
        given = layouts or (None,) * len(shape)
        settled = tuple(
            padded(size, self.tensor_shards) if layout is None and name in PADDED_AXES else layout
            for size, name, layout in zip(shape, axes, given, strict=True)
        )
        shape = tuple(layout.size if layout else size for size, layout in zip(shape, settled, strict=True))
        metadata: dict[str, Any] = {"out_sharding": axes, "eager_sharding": False, "constant": constant}
        if any(settled):
            metadata["layouts"] = settled
        value = fill(self._key, self._num_made, shape=shape, dtype=jnp.dtype(dtype or self.dtype), constant=constant)
        self._num_made += 1
        return nnx.Param(value, **metadata)
