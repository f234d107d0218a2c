"""The token table and the output head."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int32

from models.layers.initializer import Initializer


class Embedding(nnx.Module):
    """A row of numbers for each token of the vocabulary, or for each position."""

    def __init__(self, init: Initializer, vocab_size: int, size: int, *, axis: str | None = "vocab") -> None:
        self.weight = init.param((vocab_size, size), (axis, "embed"))

    def __call__(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """The rows of the tokens; ids outside the vocabulary read its nearest row."""
        return jnp.take(self.weight.get_value(), token_ids, axis=0, mode="clip")

    def attend(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Float32 products with every row of the table: the head of a model that ties it.

        The contraction reads the table as it lies; no transposed copy of it is made.
        """
        return lax.dot_general(
            hidden, self.weight.get_value(), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )


class Head(nnx.Module):
    """The output matrix of a model whose head is its own, stored [in, out] as every weight."""

    def __init__(self, init: Initializer, size: int, vocab_size: int, *, bias: bool = False) -> None:
        self.weight = init.param((size, vocab_size), ("embed", "vocab"))
        self.bias = init.param((vocab_size,), ("vocab",), constant=0.0) if bias else None

    def __call__(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Float32 logits."""
        logits = jnp.dot(hidden, self.weight.get_value(), preferred_element_type=jnp.float32)
        return logits if self.bias is None else logits + self.bias.get_value().astype(jnp.float32)[None, :]
