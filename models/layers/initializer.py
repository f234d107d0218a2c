"""How parameters come into being: shape, type, logical axes, and how checkpoints split them up."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

RANDOM_SCALE = 0.02


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

    def __init__(self, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.dtype = jnp.dtype(dtype)
        self._key = rngs.params()
        self._num_made = 0

    def param(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        constant: float | None = None,
        parts: tuple[int, ...] = (),
        groups: int = 1,
        dtype: DTypeLike | None = None,
    ) -> nnx.Param:
        """A parameter with a logical name for each axis, of the model's type or, where that is too coarse, of its own.

        `parts` are the sizes of the checkpoint tensors that share its last axis; there, each part is cut into
        `groups` pieces and the pieces are dealt out in turn: first piece of each part, second piece of each part …
        """
        metadata: dict[str, Any] = {"out_sharding": axes, "eager_sharding": False, "constant": constant}
        if parts:
            metadata |= {"parts": parts, "groups": groups}
        value = fill(self._key, self._num_made, shape=shape, dtype=jnp.dtype(dtype or self.dtype), constant=constant)
        self._num_made += 1
        return nnx.Param(value, **metadata)
