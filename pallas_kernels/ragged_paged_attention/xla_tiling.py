"""Step sizes of the xla backend's loops, and the gather of pages that they share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

NEGATIVE = -1e30
"""The logit of what a query may not see; finite, so that the difference of two logits stays a number."""

BLOCK_BYTES = 3 * 2**18
"""Keys of one decode iteration: these and as many values should stay in the level-2 caches of a few cores."""


class Tiling(NamedTuple):
    """Step sizes, chosen from static shapes alone."""

    chunk_pages: int
    """Pages of a decode item."""
    num_items: int
    """Decode items an iteration."""
    tile: int
    """Query tokens of a prefill tile."""
    edge_pages: int
    """Pages of keys that a prefill tile meets an iteration near its own tokens; four times as many further back."""


def choose_tiling(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, width: int
) -> Tiling:
    """Step sizes for T query tokens and page tables of `width` columns."""
    chunk_pages = min(max(1, 64 // page_size), width)
    item_bytes = 4 * chunk_pages * page_size * num_kv_heads * head_dim
    num_items = max(1, min(4 * num_tokens, BLOCK_BYTES // item_bytes))
    tile = max(1, min(num_tokens, 32, max(16, 640 // num_heads // 16 * 16)))  # 64: many short rows leave it half empty
    return Tiling(chunk_pages, num_items, tile, chunk_pages)


class LayerPages(NamedTuple):
    """One layer's pages within the pool, seen as one row per (page, key or value, kv head): a contiguous run."""

    rows: Num[Array, "rows page_size*H"]
    first_page: Int32[Array, ""]
    num_kv_heads: int
    page_size: int
    head_dim: int

    def keys(self, pages: Int32[Array, "W C"]) -> Float[Array, "W*K*C page_size*H"]:
        """Keys of pages in float32, ordered by (W, kv head, C)."""
        return self._gather(pages, 0)

    def values(self, pages: Int32[Array, "W C"], is_real: Bool[Array, "W C*page_size"]) -> Array:
        """Values of pages as `keys` has them, zero where no token is: a weight of 0 would not remove a NaN there."""
        (num_items, num_pages), num_kv_heads = pages.shape, self.num_kv_heads
        mask = is_real.reshape(num_items, 1, num_pages, self.page_size, 1)
        mask = jnp.broadcast_to(mask, (num_items, num_kv_heads, num_pages, self.page_size, self.head_dim))
        return jnp.where(mask.reshape(-1, self.rows.shape[1]), self._gather(pages, num_kv_heads), 0.0)

    def _gather(self, pages: Int32[Array, "W C"], first_head: int) -> Float[Array, "W*K*C page_size*H"]:
        heads = first_head + jnp.arange(self.num_kv_heads, dtype=jnp.int32)
        rows = (self.first_page + pages[:, None, :]) * (2 * self.num_kv_heads) + heads[None, :, None]
        return to_float32(self.rows.at[rows.reshape(-1)].get(mode="promise_in_bounds", wrap_negative_indices=False))


def to_float32(x: Num[Array, "..."]) -> Float[Array, "..."]:
    """x in float32, where uint16 stands for the bits of bfloat16."""
    if x.dtype != jnp.uint16:
        return x.astype(jnp.float32)
    return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)


def soft_cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    """`softcap * tanh(logits / softcap)`, or the logits where there is no cap."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
