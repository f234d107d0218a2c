"""The layer whose attention and feed-forward block read the same input, as GPT-J introduced it."""

from flax import nnx
from jaxtyping import Array, Float, Int32

from models.inputs import PagedKVCache
from models.layers.rope import RopeTable


class ParallelLayer(nnx.Module):
    """`x + attention(norm(x)) + mlp(norm(x))`; with `mlp_norm`, each block has a norm of its own."""

    def __init__(
        self, *, attention_norm: nnx.Module, attention: nnx.Module, mlp: nnx.Module, mlp_norm: nnx.Module | None = None
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedKVCache,
        layer: int | Int32[Array, ""],
        rope: RopeTable | None,
        window: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """The residual stream after the layer, and the updated cache."""
        normed = self.attention_norm(x)
        attended, cache = self.attention(normed, cache, layer, rope, window)
        return x + attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x)), cache
