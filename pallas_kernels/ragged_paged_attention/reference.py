"""The oracle: paged attention as plainly as jnp says it, one query token at a time over its whole page table."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata, token_places


def make_pool(
    *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> Float[Array, "L pages page_size 2 K H"]:
    """A zeroed pool: one array, keys and values of a token side by side."""
    return jnp.zeros((num_layers, num_pages, page_size, 2, num_kv_heads, head_dim), dtype)


def copy_pages(
    pool: Float[Array, "L pages page_size 2 K H"], src: Int32[Array, " C"], dst: Int32[Array, " C"]
) -> Float[Array, "L pages page_size 2 K H"]:
    """The pool with page `src[c]` copied to page `dst[c]` in every layer; out-of-range `dst` are dropped."""
    return pool.at[:, dst].set(pool[:, src], mode="drop")


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Float[Array, "L pages page_size 2 K H"],
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "T N H"], Float[Array, "L pages page_size 2 K H"]]:
    """Attention of every query token, and the pool with this step's keys and values."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    num_pages, page_size = pool.shape[1:3]
    places = token_places(metadata, num_tokens)

    pages = metadata.page_table[places.rows, places.positions // page_size]
    pages = jnp.where(places.is_real, pages, num_pages)  # out of range: a padding token is not written
    new = jnp.stack([k, v], axis=1).astype(pool.dtype)
    pool = pool.at[layer, pages, places.positions % page_size].set(new, mode="drop")

    def attend(token: tuple[Array, Array, Array, Array]) -> Array:
        query, row, position, is_real = token
        cached = pool[layer, metadata.page_table[row]].reshape(-1, 2, num_kv_heads, head_dim).astype(jnp.float32)
        kv_positions = jnp.arange(cached.shape[0])
        visible = (kv_positions <= position) & is_real
        if window is not None:
            visible &= (kv_positions > position - window) | (jnp.asarray(window) <= 0)
        keys, values = jnp.moveaxis(jnp.where(visible[:, None, None, None], cached, 0.0), 1, 0)  # [S, K, H] each
        query = jnp.where(is_real, query, 0.0).astype(jnp.float32).reshape(num_kv_heads, -1, head_dim)
        logits = scale * jnp.einsum("kgh,skh->kgs", query, keys).reshape(num_heads, -1)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        logits = jnp.where(visible[None, :], logits, -jnp.inf)
        sink = jnp.full((num_heads, 1), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)[:, None]
        peak = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), sink)
        weights = jnp.exp(logits - jnp.where(is_real, peak, 0.0))
        total = jnp.sum(weights, axis=1, keepdims=True) + jnp.where(is_real, jnp.exp(sink - peak), 1.0)
        weights = (weights / total).reshape(num_kv_heads, -1, weights.shape[1])
        return jnp.einsum("kgs,skh->kgh", weights, values).reshape(num_heads, head_dim)

    out = jax.lax.map(attend, (q, places.rows, places.positions, places.is_real))
    return out.astype(q.dtype), pool
