"""Paged attention in plain XLA: loops over page blocks bounded by real lengths, softmax carried along."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata, token_places


class Pool(NamedTuple):
    """Keys and values of all layers, page by page."""

    k: Float[Array, "L pages page_size K H"]
    v: Float[Array, "L pages page_size K H"]


def make_pool(*, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any) -> Pool:
    """A zeroed pool of two arrays."""
    shape = (num_layers, num_pages, page_size, num_kv_heads, head_dim)
    return Pool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def copy_pages(pool: Pool, src: Int32[Array, " C"], dst: Int32[Array, " C"]) -> Pool:
    """The pool with page `src[c]` copied to page `dst[c]` in every layer; out-of-range `dst` are dropped."""

    def copy(leaf: Array) -> Array:
        num_layers, num_pages = leaf.shape[:2]
        flat = leaf.reshape(-1, *leaf.shape[2:])
        first = (jnp.arange(num_layers, dtype=jnp.int32) * num_pages)[:, None]
        ok = (dst >= 0) & (dst < num_pages)
        target = jnp.where(ok[None, :], first + dst[None, :], flat.shape[0]).reshape(-1)
        source = (first + jnp.clip(src, 0, num_pages - 1)[None, :]).reshape(-1)
        return flat.at[target].set(flat[source], mode="drop").reshape(leaf.shape)

    return Pool(*map(copy, pool))


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Pool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "T N H"], Pool]:
    """Attention of every query token, and the pool with this step's keys and values."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_pages, page_size = k.shape[1], *pool.k.shape[1:3]
    groups = num_heads // num_kv_heads
    num_rows, width = metadata.page_table.shape
    places = token_places(metadata, num_tokens)
    base = jnp.asarray(layer, jnp.int32) * num_pages

    pages = base + metadata.page_table[places.rows, places.positions // page_size]
    pages = jnp.where(places.is_real, pages, math.prod(pool.k.shape[:2]))
    offsets = places.positions % page_size
    flat_k, flat_v = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in pool)
    flat_k = flat_k.at[pages, offsets].set(k.astype(flat_k.dtype), mode="drop")
    flat_v = flat_v.at[pages, offsets].set(v.astype(flat_v.dtype), mode="drop")

    tile = min(64, num_tokens)
    block_pages = min(max(1, 128 // page_size), width)
    block = block_pages * page_size
    q = jnp.concatenate([q, jnp.zeros((tile, num_heads, head_dim), q.dtype)])

    def attend_tile(row, first_token, out):
        """Queries [first_token, first_token + tile) of one row over its pages, in blocks."""
        rows_q = lax.dynamic_slice_in_dim(q, first_token, tile)
        last = metadata.cu_q_lens[row + 1]
        is_own = first_token + jnp.arange(tile) < last
        positions = metadata.kv_lens[row] - last + first_token + jnp.arange(tile)
        rows_q = jnp.where(is_own[:, None, None], rows_q, 0).astype(jnp.float32) * scale
        rows_q = rows_q.reshape(tile, num_kv_heads, groups, head_dim)
        low = jnp.zeros((), jnp.int32)
        if window is not None:
            low = jnp.where(jnp.asarray(window) > 0, jnp.maximum(positions[0] - window + 1, 0), 0)
        stop = jnp.minimum(positions[0] + tile, metadata.kv_lens[row])

        def attend_block(j, carry):
            peak, total, acc = carry
            columns = jnp.minimum(j * block_pages + jnp.arange(block_pages), width - 1)
            block_table = base + metadata.page_table[row, columns]
            kv_positions = j * block + jnp.arange(block)
            exists = (kv_positions < stop)[:, None, None]
            keys = flat_k[block_table].reshape(block, num_kv_heads, head_dim)
            values = flat_v[block_table].reshape(block, num_kv_heads, head_dim)
            keys, values = (jnp.where(exists, x, 0).astype(jnp.float32) for x in (keys, values))
            logits = jnp.einsum("tkgh,skh->tkgs", rows_q, keys)
            if softcap is not None:
                logits = softcap * jnp.tanh(logits / softcap)
            visible = (kv_positions[None, :] <= positions[:, None]) & (kv_positions < stop)[None, :]
            if window is not None:
                visible &= (kv_positions[None, :] > positions[:, None] - window) | (jnp.asarray(window) <= 0)
            visible = visible[:, None, None, :]
            new_peak = jnp.maximum(peak, jnp.max(jnp.where(visible, logits, -1e30), axis=-1))
            weights = jnp.where(visible, jnp.exp(logits - new_peak[..., None]), 0.0)
            decay = jnp.exp(peak - new_peak)
            total = total * decay + jnp.sum(weights, axis=-1)
            acc = acc * decay[..., None] + jnp.einsum("tkgs,skh->tkgh", weights, values)
            return new_peak, total, acc

        shape = (tile, num_kv_heads, groups)
        peak, total = jnp.full(shape, -1e30), jnp.zeros(shape)
        if sinks is not None:
            peak = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, num_kv_heads, groups), shape)
            total = jnp.ones(shape)
        carry = (peak, total, jnp.zeros((*shape, head_dim)))
        _, total, acc = lax.fori_loop(low // block, (stop + block - 1) // block, attend_block, carry)
        result = acc / jnp.where(total > 0, total, 1.0)[..., None]
        result = result.reshape(tile, num_heads, head_dim).astype(q.dtype)
        old = lax.dynamic_slice_in_dim(out, first_token, tile)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_own[:, None, None], result, old), first_token, axis=0)

    def attend_row(row, out):
        first, last = metadata.cu_q_lens[row], metadata.cu_q_lens[row + 1]
        num_tiles = (last - first + tile - 1) // tile
        return lax.fori_loop(0, num_tiles, lambda i, out: attend_tile(row, first + i * tile, out), out)

    out = lax.fori_loop(0, num_rows, attend_row, jnp.zeros_like(q))
    pool = Pool(flat_k.reshape(pool.k.shape), flat_v.reshape(pool.v.shape))
    return out[:num_tokens], pool
