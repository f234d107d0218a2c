"""Normalisations over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.layers.axis_layout import AxisLayout
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


class FlatRMSNorm(nnx.Module):
    """An RMSNorm over all heads of a token together: `size` numbers; `x` may have copies of all, and zeros besides."""

    def __init__(
        self, init: Initializer, size: int, *, eps: float, axis: str, layout: AxisLayout | None, copies: int = 1
    ) -> None:
        self.weight = init.param((size,), (axis,), constant=1.0, layouts=(layout,))
        self.count = size * copies
        self.eps = eps

    def __call__(self, x: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
        """The normalised `x`, in its type."""
        wide = x.astype(jnp.float32)
        squares = jnp.sum(wide * wide, axis=(1, 2), keepdims=True) / self.count
        weight = self.weight.get_value().astype(jnp.float32).reshape(1, *x.shape[1:])
        return (wide * jax.lax.rsqrt(squares + self.eps) * weight).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / std(x) * (weight + offset) + bias`, over the last axis."""

    def __init__(self, init: Initializer, size: int, *, eps: float, bias: bool = True, offset: float = 0.0) -> None:
        self.weight = init.param((size,), (None,), constant=1.0 - offset)
        self.bias = init.param((size,), (None,), constant=0.0) if bias else None
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


class HeadLayerNorm(LayerNorm):
    """A LayerNorm without bias over the channels of each of `num_heads` heads, with weights of its own for each."""

    def __init__(
        self, init: Initializer, num_heads: int, head_dim: int, *, eps: float, axis: str, layout: AxisLayout | None
    ) -> None:
        self.weight = init.param((num_heads, head_dim), (axis, None), constant=1.0, layouts=(layout, None))
        self.bias = None
        self.eps = eps
        self.offset = 0.0
