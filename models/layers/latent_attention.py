"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed vector a token is all that is cached.

Keys and values of every head are linear in that vector, so their matrices are applied to queries and results instead:
attention then has one kv head, whose keys are the vector and a rotated part, and whose values are the vector.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.inputs import PagedKVCache
from models.layers.axis_layout import AxisLayout, Block, picked
from models.layers.choice import use_weight
from models.layers.initializer import Initializer
from models.layers.linear import Linear, keep_apart
from models.layers.norm import RMSNorm
from models.layers.rope import RopeTable, apply_rope

LATENT_NORM_EPS = 1e-6
"""Of the norms within, whatever the configuration says of the others."""


class LatentAttention(nnx.Module):
    """Attention over latents; queries come through a compressed vector of their own if `q_rank` is given.

    A head's query and key have a part of `nope_dim` channels that is compressed and one of `rope_dim` that is rotated
    (the key's is the same for all heads); its value has `v_dim`.
    """

    def __init__(
        self,
        init: Initializer,
        size: int,
        num_heads: int,
        *,
        q_rank: int | None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        scale: float,
        bias: bool = False,
        interleaved_rope: bool = True,
    ) -> None:
        # Heads that do not divide among the tensor shards are filled up with empty ones.
        heads: list[int | None] = [*range(num_heads), *[None] * (-num_heads % init.tensor_shards)]
        q_columns, out_rows = (picked(heads, num_heads, unit) for unit in (nope_dim + rope_dim, v_dim))
        width = num_heads * (nope_dim + rope_dim)
        self.q_down = None if q_rank is None else Linear(init, size, q_rank, ("embed", None), bias=bias)
        self.q_norm = None if q_rank is None else RMSNorm(init, q_rank, eps=LATENT_NORM_EPS)
        self.q = Linear(init, q_rank or size, width, ("embed", "heads"), out_layout=q_columns)
        self.kv_down = Linear(init, size, kv_rank + rope_dim, ("embed", None), bias=bias)
        self.kv_norm = RMSNorm(init, kv_rank, eps=LATENT_NORM_EPS)

        def rows_of_heads(first: int, size: int) -> nnx.Param:
            """A head's rows from `first` on, of a matrix that has its rows of keys before its rows of values."""
            num_rows = nope_dim + v_dim
            blocks = tuple(Block(None if head is None else head * num_rows + first, size) for head in heads)
            layout = AxisLayout((num_heads * num_rows,), blocks)
            return init.param((layout.size, kv_rank), ("heads", None), layouts=(layout, None))

        self.key_up = rows_of_heads(0, nope_dim)
        self.value_up = rows_of_heads(nope_dim, v_dim)
        self.out = Linear(init, num_heads * v_dim, size, ("heads", "embed"), bias=bias, in_layout=out_rows)
        self.num_heads = len(heads)
        self.kv_rank, self.nope_dim = kv_rank, nope_dim
        self.scale = scale
        self.interleaved_rope = interleaved_rope

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedKVCache,
        layer: int | Int32[Array, ""],
        rope: RopeTable | None,
        window: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """The block's output without the residual, and the cache with this layer's latents."""
        num_tokens = x.shape[0]
        assert rope is not None
        compressed = x
        if self.q_down is not None and self.q_norm is not None:
            compressed = self.q_norm(self.q_down(x))
        q = keep_apart(self.q(compressed)).reshape(num_tokens, self.num_heads, -1)
        down = keep_apart(self.kv_down(x))
        latent, k_rope = self.kv_norm(down[:, : self.kv_rank]), down[:, None, self.kv_rank :]
        q_rope, k_rope = (
            apply_rope(part, rope, interleaved=self.interleaved_rope) for part in (q[..., self.nope_dim :], k_rope)
        )

        q_nope = q[..., : self.nope_dim]
        q_latent = self._per_head("tnp,npr->tnr", q_nope, self.key_up)
        queries = jnp.concatenate([q_latent, q_rope], axis=-1)
        keys = jnp.concatenate([latent[:, None, :], k_rope], axis=-1)
        seen, cache = cache.attend(layer, queries, keys, None, scale=self.scale, window=window, value_dim=self.kv_rank)
        out = self._per_head("tnr,nvr->tnv", seen, self.value_up)
        return self.out(out.reshape(num_tokens, -1)), cache

    def _per_head(self, product: str, x: Float[Array, "T N I"], weight: nnx.Param) -> Float[Array, "T N O"]:
        """The product of each head with its own rows of the weight."""
        return use_weight(
            weight.get_value(), lambda rows: jnp.einsum(product, x, rows.reshape(self.num_heads, -1, self.kv_rank))
        )
