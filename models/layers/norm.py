"""Normalisations over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.layers.initializer import Initializer


def _along_last(weight: Float[Array, "*S"], ndim: int) -> Float[Array, "... D"]:
    return weight.astype(jnp.float32).reshape((1,) * (ndim - weight.ndim) + weight.shape)


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


class FlatRMSNorm(RMSNorm):
    """An RMSNorm over all heads of a token together."""

    def __call__(self, x: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """The normalised `x`, in its type."""
        return super().__call__(x.reshape(x.shape[0], -1)).reshape(x.shape)


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / std(x) * (weight + offset) + bias`, over the last axis.

    A `shape` of two axes gives every head weights of its own.
    """

    def __init__(
        self, init: Initializer, shape: int | tuple[int, ...], *, eps: float, bias: bool = True, offset: float = 0.0
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else shape
        axes = (None,) * len(shape)
        self.weight = init.param(shape, axes, constant=1.0 - offset)
        self.bias = init.param(shape, axes, constant=0.0) if bias else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The normalised `x`, in its type."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        wide = wide * (_along_last(self.weight.get_value(), x.ndim) + self.offset)
        if self.bias is not None:
            wide = wide + _along_last(self.bias.get_value(), x.ndim)
        return wide.astype(x.dtype)
