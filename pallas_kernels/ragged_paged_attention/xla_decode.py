"""Attention of rows with one query token each, as a loop over (row, chunk of pages) items, several at a time.

Items are taken in order whatever rows they belong to, so that the work is the sum of the rows' lengths; each item's
softmax is joined to its row's by a matmul with the items' one-hot rows (flash decoding).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.ragged_paged_attention.xla_tiling import NEGATIVE, Block, LayerPages, Tiling, soft_cap


class DecodeItems(NamedTuple):
    """Every (row, chunk) item that the rows could need, the needed ones first; the same for all layers."""

    num_needed: Int32[Array, ""]
    rows: Int32[Array, " items"]
    """The row of an item; B for an item that is not needed."""
    pages: Int32[Array, "items C"]
    starts: Int32[Array, " items"]
    """Position of an item's first token."""


def list_items(
    kv_lens: Int32[Array, " B"],
    page_table: Int32[Array, "B P"],
    page_size: int,
    tiling: Tiling,
    window: int | Int32[Array, ""] | None,
) -> DecodeItems:
    """The items of rows of `kv_lens` tokens; a row of none has no item."""
    num_rows, width = page_table.shape
    chunk_pages = tiling.chunk_pages
    chunk = chunk_pages * page_size
    chunks_per_row = -(-width // chunk_pages)
    first = jnp.zeros_like(kv_lens) if window is None else visible_from(kv_lens, window) // chunk
    ends = jnp.cumsum((kv_lens + chunk - 1) // chunk - first, dtype=jnp.int32)
    # Whole iterations, so that slices of the list never have to be clamped.
    num_items = -(-num_rows * chunks_per_row // tiling.num_items) * tiling.num_items
    items = jnp.arange(num_items, dtype=jnp.int32)
    # An item's row is the number of rows that end at or before it.
    rows = jnp.cumsum(jnp.zeros(num_items, jnp.int32).at[ends].add(1, mode="drop"), dtype=jnp.int32)
    own = jnp.minimum(rows, num_rows - 1)
    # Items of row r run from ends[r - 1] on; adding what the chunks skipped gives the chunk's number in its row.
    before = jnp.where(own > 0, ends[own - 1], 0)
    chunks = jnp.minimum(items - before + first[own], chunks_per_row - 1)
    table = jnp.pad(page_table, ((0, 0), (0, chunks_per_row * chunk_pages - width)))
    table = table.reshape(num_rows * chunks_per_row, chunk_pages)
    pages = table[own * chunks_per_row + chunks]
    return DecodeItems(ends[-1], rows, pages, chunks * chunk)


def visible_from(stops: Int32[Array, "*S"], window: int | Int32[Array, ""]) -> Int32[Array, "*S"]:
    """First position that the last of `stops` tokens sees."""
    return jnp.where(jnp.asarray(window) > 0, jnp.maximum(stops - window, 0), 0)


def attend_decode(
    q: Float[Array, "B N H"],
    kv_lens: Int32[Array, " B"],
    items: DecodeItems,
    layer: LayerPages,
    tiling: Tiling,
    *,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B N H"]:
    """Attention in float32 of one scaled query token a row over its tokens; zeros for rows of none."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_items = layer.num_kv_heads, tiling.num_items
    chunk = tiling.chunk_pages * layer.page_size
    heads = (num_items, num_kv_heads, num_heads // num_kv_heads)

    def attend_items(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        rows, pages, starts = (lax.dynamic_slice_in_dim(x, step * num_items, num_items) for x in items[1:])
        is_needed = rows < num_rows
        own = jnp.minimum(rows, num_rows - 1)
        stops = jnp.where(is_needed, kv_lens[own], 0)
        visible = token_mask(starts, stops, chunk, window)
        block = gather(layer, pages, visible, step < items.num_needed)
        keys, values = (x.reshape(*heads[:2], chunk, head_dim) for x in (block.keys, block.values))

        # 1. Each item's own softmax, unnormalised.
        logits = jnp.einsum("wkgh,wksh->wkgs", q[own].reshape(*heads, head_dim), keys)
        logits = multiply(logits, block.key_scales)
        logits = jnp.where(visible[:, None, None, :], soft_cap(logits, softcap), NEGATIVE)
        item_peak = jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - item_peak[..., None])
        item_total = jnp.sum(weights, axis=-1).reshape(num_items, num_heads)
        weights = multiply(weights, block.value_scales)
        item_acc = jnp.einsum("wkgs,wksh->wkgh", weights, values).reshape(num_items, num_heads, head_dim)
        item_peak = item_peak.reshape(num_items, num_heads)

        # 2. Join them to their rows'.
        is_own = jnp.arange(num_rows)[:, None] == rows[None, :]  # [B, W], no row for an item that is not needed
        row_peak = jnp.max(jnp.where(is_own[:, :, None], item_peak[None], NEGATIVE), axis=1)
        new_peak = jnp.maximum(peak, row_peak)
        factor = jnp.where(is_needed[:, None], jnp.exp(item_peak - new_peak[own]), 0.0)
        decay = jnp.exp(peak - new_peak)
        join = is_own.astype(jnp.float32)
        total = total * decay + join @ (item_total * factor)
        item_acc = (item_acc * factor[..., None]).reshape(num_items, -1)
        acc = acc * decay[..., None] + (join @ item_acc).reshape(acc.shape)
        return new_peak, total, acc

    peak, total = jnp.full((num_rows, num_heads), NEGATIVE), jnp.zeros((num_rows, num_heads))
    if sinks is not None:
        peak, total = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :], peak.shape), total + 1.0
    num_steps = (items.num_needed + num_items - 1) // num_items
    carry = (peak, total, jnp.zeros(q.shape, jnp.float32))
    _, total, acc = lax.fori_loop(0, num_steps, attend_items, carry)
    return acc / jnp.where(total > 0, total, 1.0)[..., None]


def token_mask(
    starts: Int32[Array, " W"], stops: Int32[Array, " W"], chunk: int, window: int | Int32[Array, ""] | None
) -> Bool[Array, "W S"]:
    """Which of an item's tokens its row's query sees."""
    positions = starts[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
    visible = positions < stops[:, None]
    if window is not None:
        visible &= positions >= visible_from(stops, window)[:, None]
    return visible


def multiply(x: Float[Array, "*W K G S"], scales: Float[Array, "W*K*C page_size"] | None) -> Float[Array, "*W K G S"]:
    """`x` times each cached token's scale, if there are any."""
    return x if scales is None else x * scales.reshape(*x.shape[:-2], 1, x.shape[-1])


def gather(
    layer: LayerPages, pages: Int32[Array, "W C"], is_real: Bool[Array, "W S"], is_live: Bool[Array, ""]
) -> Block:
    """The block of pages.

    In a branch (always the same one), because XLA:CPU fuses what follows a gather into it, and then copies a head of
    a token at a time, computing its address anew, where a whole row at a time is twice as fast.
    """
    return lax.cond(is_live, lambda: layer.block(pages, is_real), lambda: layer.no_block(pages))
