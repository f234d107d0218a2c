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


class Block(NamedTuple):
    """Keys and values of pages in float32, ordered by (W, kv head, C), and what multiplies logits and weights."""

    keys: Float[Array, "W*K*C page_size*H"]
    values: Float[Array, "W*K*C page_size*H"]
    key_scales: Float[Array, "W*K*C page_size"] | None
    value_scales: Float[Array, "W*K*C page_size"] | None
    """0 where no token is."""


class LayerPages(NamedTuple):
    """One layer's pages within the pool, seen as one row per (page, key or value, kv head): a contiguous run."""

    rows: Num[Array, "rows page_size*H"]
    scales: Float[Array, "rows page_size"] | None
    first_page: Int32[Array, ""]
    num_kv_heads: int
    page_size: int
    head_dim: int
    is_latent: bool
    """The values are the keys."""

    def block(self, pages: Int32[Array, "W C"], is_real: Bool[Array, "W C*page_size"]) -> Block:
        """What the pages hold; values, or their scales, are 0 where no token is: a weight of 0 leaves a NaN there."""
        key_rows = value_rows = self._row_numbers(pages, 0)
        keys = values = to_float32(_gather(self.rows, key_rows))
        if not self.is_latent:
            value_rows = self._row_numbers(pages, self.num_kv_heads)
            values = to_float32(_gather(self.rows, value_rows))
        if self.scales is None:
            is_real = self._spread(is_real[..., None], pages.shape, self.head_dim)
            return Block(keys, jnp.where(is_real, values, 0.0), None, None)
        is_real = self._spread(is_real[..., None], pages.shape, 1)
        unit = FLOAT8_UNIT if self.rows.dtype == jnp.uint8 else 1.0
        key_scales, value_scales = (unit * _gather(self.scales, rows) for rows in (key_rows, value_rows))
        return Block(keys, values, key_scales, jnp.where(is_real, value_scales, 0.0))

    def no_block(self, pages: Int32[Array, "W C"]) -> Block:
        """Zeros in the shape of a block."""
        num_rows = pages.size * self.num_kv_heads
        zeros = jnp.zeros((num_rows, self.rows.shape[1]), jnp.float32)
        scales = None if self.scales is None else jnp.zeros((num_rows, self.page_size), jnp.float32)
        return Block(zeros, zeros, scales, scales)

    def _row_numbers(self, pages: Int32[Array, "W C"], first_head: int) -> Int32[Array, " W*K*C"]:
        heads = first_head + jnp.arange(self.num_kv_heads, dtype=jnp.int32)
        rows_per_page = 1 if self.is_latent else 2 * self.num_kv_heads
        rows = (self.first_page + pages[:, None, :]) * rows_per_page + heads[None, :, None]
        return rows.reshape(-1)

    def _spread(self, mask: Bool[Array, "W C*page_size 1"], shape: tuple[int, ...], size: int) -> Bool[Array, "R S"]:
        """A mask of tokens for every kv head's row of `size` entries a token."""
        mask = mask.reshape(shape[0], 1, shape[1], self.page_size, 1)
        mask = jnp.broadcast_to(mask, (shape[0], self.num_kv_heads, shape[1], self.page_size, size))
        return mask.reshape(-1, self.page_size * size)


def _gather(rows: Num[Array, "rows X"], numbers: Int32[Array, " n"]) -> Num[Array, "n X"]:
    return rows.at[numbers].get(mode="promise_in_bounds", wrap_negative_indices=False)


FLOAT8_UNIT = 256.0
"""What `to_float32` leaves out of a float8."""


def to_float32(x: Num[Array, "..."]) -> Float[Array, "..."]:
    """x in float32, where uint16 stands for the bits of bfloat16, and uint8 for those of 256 times a float8_e4m3fn.

    A float8's exponent and fraction fit a float16's, whose exponents begin 8 lower; this keeps subnormal numbers.
    """
    if x.dtype == jnp.uint8:
        wide = x.astype(jnp.uint16)
        return lax.bitcast_convert_type(((wide & 0x80) << 8) | ((wide & 0x7F) << 7), jnp.float16).astype(jnp.float32)
    if x.dtype != jnp.uint16:
        return x.astype(jnp.float32)
    return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)


def soft_cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    """`softcap * tanh(logits / softcap)`, or the logits where there is no cap."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
