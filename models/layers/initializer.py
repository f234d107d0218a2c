"""How parameters come into being: shape, type, logical axes, and how checkpoints split them up."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

RANDOM_SCALE = 0.02


def fill(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, constant: float | None) -> jax.Array:
    """Random values of a matrix, or `constant` everywhere where one is given (norms, biases)."""
    if constant is not None:
        return jnp.full(shape, constant, dtype)
    return (RANDOM_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@dataclass
class Initializer:
    """Makes the parameters of one model, all of one type; run it under `nnx.eval_shape` to take no memory."""

    dtype: DTypeLike
    rngs: nnx.Rngs

    def param(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        constant: float | None = None,
        parts: tuple[int, ...] = (),
        groups: int = 1,
    ) -> nnx.Param:
        """A parameter with a logical name for each axis.

        `parts` are the sizes of the checkpoint tensors that share its last axis; there, each part is cut into
        `groups` pieces and the pieces are dealt out in turn: first piece of each part, second piece of each part …
        """
        metadata: dict[str, Any] = {"out_sharding": axes, "eager_sharding": False, "constant": constant}
        if parts:
            metadata |= {"parts": parts, "groups": groups}
        return nnx.Param(fill(self.rngs.params(), shape, self.dtype, constant), **metadata)
