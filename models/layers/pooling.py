"""From a row's hidden states to one vector: the choice or mean of its tokens, then perhaps a projection or classes."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models.layers.activations import activation
from models.layers.initializer import Initializer
from models.layers.linear import Linear

Pooling = Literal["cls", "mean", "last"]


def pool(hidden: Float[Array, "T D"], cu_lens: Int32[Array, " R+1"], pooling: Pooling) -> Float32[Array, "R D"]:
    """One float32 vector a row: its first token's, its last token's, or the mean of all.

    Whatever padding holds leaves the rows as they are; rows of no tokens get numbers without meaning.
    """
    hidden = hidden.astype(jnp.float32)
    starts, ends = cu_lens[:-1], cu_lens[1:]
    if pooling == "cls":
        return hidden.at[starts].get(mode="clip")
    if pooling == "last":
        return hidden[jnp.maximum(ends - 1, 0)]
    num_rows = starts.shape[0]
    # Padding is of row R, one more than there are.
    rows = jnp.searchsorted(ends, jnp.arange(hidden.shape[0]), side="right")
    sums = jax.ops.segment_sum(hidden, rows, num_segments=num_rows + 1)[:num_rows]
    return sums / jnp.maximum(ends - starts, 1)[:, None].astype(jnp.float32)


class Projection(nnx.Module):
    """`act(x @ weight + bias)`: a Dense module of sentence-transformers, in float32."""

    def __init__(self, init: Initializer, in_size: int, out_size: int, *, act: str | None, bias: bool) -> None:
        self.linear = Linear(init, in_size, out_size, ("embed", None), bias=bias)
        self.act = None if act is None else activation(act)

    def __call__(self, x: Float32[Array, "R I"]) -> Float32[Array, "R O"]:
        """The projected rows."""
        x = self.linear(x)
        return x if self.act is None else self.act(x)


class ClassificationHead(nnx.Module):
    """Class logits of pooled rows: perhaps a dense layer with activation and norm, then the output matrix."""

    def __init__(
        self,
        init: Initializer,
        size: int,
        num_labels: int,
        *,
        bias: bool,
        act: str | None = None,
        dense_bias: bool = True,
        norm: nnx.Module | None = None,
    ) -> None:
        """With `act` there is a dense layer of `size` before the output matrix, and `norm` after it."""
        self.dense = None if act is None else Linear(init, size, size, ("embed", None), bias=dense_bias)
        self.act = None if act is None else activation(act)
        self.norm = norm
        self.out = Linear(init, size, num_labels, ("embed", None), bias=bias)

    def __call__(self, x: Float[Array, "R D"]) -> Float32[Array, "R L"]:
        """Float32 logits."""
        x = x.astype(self.out.weight.get_value().dtype)
        if self.dense is not None and self.act is not None:
            x = self.act(self.dense(x))
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x).astype(jnp.float32)
