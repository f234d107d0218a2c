"""Self-attention through the paged cache."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Float, Int32

from models.inputs import PagedKVCache
from models.layers.head_layout import HeadLayout
from models.layers.initializer import Initializer
from models.layers.linear import Linear, keep_apart
from models.layers.rope import RopeTable, apply_rope

HeadNorm = Callable[[Float[Array, "T N H"]], Float[Array, "T N H"]]


class Attention(nnx.Module):
    """Grouped-query attention with q, k and v in one matrix.

    The matrix has the columns of one kv head after another: its G query heads, its key head, its value head. One
    product is faster than three at one row, and any even split of the columns keeps groups together. Heads that do not
    divide among the tensor shards are copied and padded (see `HeadLayout`): the numbers here are those then.
    """

    def __init__(
        self,
        init: Initializer,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        interleaved_rope: bool = False,
        sinks: bool = False,
    ) -> None:
        heads = HeadLayout(num_heads, num_kv_heads, init.tensor_shards)
        columns = heads.qkv_layout(head_dim)
        self.qkv = Linear(init, size, columns.size, ("embed", "kv_heads"), bias=bias, out_layout=columns)
        rows = heads.heads_layout(head_dim)
        self.out = Linear(init, num_heads * head_dim, size, ("heads", "embed"), bias=out_bias, in_layout=rows)
        layouts = (heads.heads_layout(),)
        self.sinks = init.param((num_heads,), ("heads",), constant=0.0, layouts=layouts) if sinks else None
        """A logit for each query head that joins the softmax's denominator only."""
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.num_heads = heads.num_spread_heads
        self.num_kv_heads = heads.num_spread_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.interleaved_rope = interleaved_rope

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: PagedKVCache,
        layer: int | Int32[Array, ""],
        rope: RopeTable | None,
        window: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """The block's output without the residual, and the cache with this layer's keys and values."""
        q, k, v = self.project(x)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if rope is not None:
            q = apply_rope(q, rope, interleaved=self.interleaved_rope)
            k = apply_rope(k, rope, interleaved=self.interleaved_rope)
        sinks = None if self.sinks is None else self.sinks.get_value()
        out, cache = cache.attend(layer, q, k, v, scale=self.scale, window=window, softcap=self.softcap, sinks=sinks)
        return self.out(out.reshape(x.shape[0], -1)), cache

    def project(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values as the matrix gives them."""
        num_tokens = x.shape[0]
        num_groups = self.num_heads // self.num_kv_heads
        qkv = keep_apart(self.qkv(x)).reshape(num_tokens, self.num_kv_heads, num_groups + 2, self.head_dim)
        q = qkv[:, :, :num_groups].reshape(num_tokens, self.num_heads, self.head_dim)
        return q, qkv[:, :, num_groups], qkv[:, :, num_groups + 1]
