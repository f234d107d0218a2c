"""Attention of rows with several query tokens: a loop over tiles of queries, each over the keys that it can see."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.xla_decode import gather, multiply, visible_from
from pallas_kernels.ragged_paged_attention.xla_tiling import NEGATIVE, LayerPages, Tiling, soft_cap

FAR = 4
"""How many times larger blocks of keys are far from a tile's own tokens."""

Carry = tuple[Float[Array, "K G tile"], Float[Array, "K G tile"], Float[Array, "K G tile H"]]
"""Largest logit, sum of exponentials, and weighted sum of values of each query so far."""


class PrefillTiles(NamedTuple):
    """Every tile of query tokens that the batch could need, the needed ones first; the same for all layers."""

    num_needed: Int32[Array, ""]
    rows: Int32[Array, " tiles"]
    first_tokens: Int32[Array, " tiles"]


def list_tiles(metadata: AttentionMetadata, num_tokens: int, tile: int) -> PrefillTiles:
    """The tiles of all rows from `num_decode_rows` on; no tile spans two rows."""
    num_rows = metadata.kv_lens.shape[0]
    firsts, lasts = metadata.cu_q_lens[:-1], metadata.cu_q_lens[1:]
    is_prefill = jnp.arange(num_rows) >= metadata.num_decode_rows
    ends = jnp.cumsum(jnp.where(is_prefill, (lasts - firsts + tile - 1) // tile, 0), dtype=jnp.int32)
    tiles = jnp.arange(num_tokens // tile + min(num_rows, num_tokens), dtype=jnp.int32)
    rows = jnp.minimum(jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    before = jnp.where(rows > 0, ends[rows - 1], 0)
    return PrefillTiles(ends[-1], rows, firsts[rows] + (tiles - before) * tile)


def attend_prefill(
    q: Float[Array, "T+tile N H"],
    out: Float[Array, "T+tile N H"],
    tiles: PrefillTiles,
    metadata: AttentionMetadata,
    layer: LayerPages,
    tiling: Tiling,
    *,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T+tile N H"]:
    """`out` with the attention, in float32, of the tiles' scaled query tokens filled in."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, tile, page_size = layer.num_kv_heads, tiling.tile, layer.page_size
    groups = num_heads // num_kv_heads
    # Far from the tile's own tokens blocks are larger and, without a window, need no mask.
    far_pages, edge_pages = FAR * tiling.edge_pages, tiling.edge_pages
    table = jnp.pad(metadata.page_table, ((0, 0), (0, far_pages - 1)))

    def attend_tile(index: Array, out: Array) -> Array:
        row, first_token = tiles.rows[index], tiles.first_tokens[index]
        tokens = first_token + jnp.arange(tile, dtype=jnp.int32)
        last_token, kv_len = metadata.cu_q_lens[row + 1], metadata.kv_lens[row]
        positions = kv_len - last_token + tokens
        stop = jnp.minimum(positions[0] + tile, kv_len)
        queries = lax.dynamic_slice_in_dim(q, first_token, tile).reshape(tile, num_kv_heads, groups, head_dim)
        queries = jnp.transpose(queries, (1, 2, 0, 3)).reshape(num_kv_heads, groups * tile, head_dim)

        # What is out of the first query's sight may be anybody's by now, or no number.
        oldest = jnp.int32(0) if window is None else visible_from(positions[0] + 1, window)

        def attend_block(num_pages: int, is_masked: bool, step: Array, carry: Carry) -> Carry:
            peak, total, acc = carry
            block = num_pages * page_size
            pages = lax.dynamic_slice(table, (row, step * num_pages), (1, num_pages))
            kv_positions = step * block + jnp.arange(block, dtype=jnp.int32)
            is_real = (kv_positions >= oldest) & (kv_positions < stop)
            cached = gather(layer, pages, is_real[None, :], step * block < stop)
            keys, values = (x.reshape(num_kv_heads, block, head_dim) for x in (cached.keys, cached.values))
            logits = multiply(jnp.einsum("kqh,ksh->kqs", queries, keys), cached.key_scales)
            logits = soft_cap(logits, softcap).reshape(num_kv_heads, groups, tile, block)
            if is_masked:
                logits = jnp.where(causal_mask(positions, kv_positions, window)[None, None], logits, NEGATIVE)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
            # A query that has seen nothing yet has a peak of NEGATIVE, and must not count what it may not see.
            weights = jnp.exp(logits - jnp.maximum(new_peak, 0.5 * NEGATIVE)[..., None])
            decay = jnp.exp(peak - new_peak)
            total = total * decay + jnp.sum(weights, axis=-1)
            weights = multiply(weights.reshape(num_kv_heads, groups * tile, block), cached.value_scales)
            new = jnp.einsum("kqs,ksh->kqh", weights, values)
            return new_peak, total, acc * decay[..., None] + new.reshape(acc.shape)

        carry = start(sinks, (num_kv_heads, groups, tile), head_dim)
        first = oldest // (far_pages * page_size)
        num_far, num_edge = (positions[0] + 1) // (far_pages * page_size), -(-stop // (edge_pages * page_size))
        carry = lax.fori_loop(first, num_far, partial(attend_block, far_pages, window is not None), carry)
        _, total, acc = lax.fori_loop(FAR * num_far, num_edge, partial(attend_block, edge_pages, True), carry)
        result = acc / jnp.where(total > 0, total, 1.0)[..., None]
        result = jnp.transpose(result, (2, 0, 1, 3)).reshape(tile, num_heads, head_dim)
        old = lax.dynamic_slice_in_dim(out, first_token, tile)
        new = jnp.where((tokens < last_token)[:, None, None], result, old)
        return lax.dynamic_update_slice_in_dim(out, new, first_token, axis=0)

    return lax.fori_loop(0, tiles.num_needed, attend_tile, out)


def start(sinks: Float[Array, " N"] | None, shape: tuple[int, int, int], head_dim: int) -> Carry:
    """Peak, total and sum of a softmax that has seen nothing but the sinks."""
    peak, total, acc = jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, head_dim))
    if sinks is None:
        return peak, total, acc
    return jnp.broadcast_to(sinks.astype(jnp.float32).reshape(*shape[:2], 1), shape), total + 1.0, acc


def causal_mask(
    positions: Int32[Array, " T"], kv_positions: Int32[Array, " S"], window: int | Int32[Array, ""] | None
) -> Bool[Array, "T S"]:
    """Which cached tokens each query sees."""
    visible = kv_positions[None, :] <= positions[:, None]
    if window is not None:
        visible &= kv_positions[None, :] >= visible_from(positions + 1, window)[:, None]
    return visible
