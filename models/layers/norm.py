"""Normalisations over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.layers.initializer import Initializer


def _along_last(weight: Float[Array, " D"], ndim: int) -> Float[Array, "... D"]:
    return weight.astype(jnp.float32).reshape((1,) * (ndim - 1) + weight.shape)


class RMSNorm(nnx.Module):
    """`x / rms(x) * (weight + offset)`; Gemma stores its weights less an offset of 1."""

    def __init__(self, init: Initializer, size: int, *, eps: float, offset: float = 0.0) -> None:
        self.weight = init.param((size,), (None,), constant=1.0 - offset)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The normalised `x`, in its type."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (_along_last(self.weight.get_value(), x.ndim) + self.offset)).astype(x.dtype)
