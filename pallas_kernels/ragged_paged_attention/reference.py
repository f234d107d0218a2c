"""The oracle: paged attention as plainly as jnp says it, one query token at a time over its whole page table."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata, token_places
from pallas_kernels.ragged_paged_attention.page_transfer import PageContent
from pallas_kernels.ragged_paged_attention.quantisation import QuantisedPool, is_quantised, quantise

PAGE_FIRST = (1, 0, 3, 2, 4, 5)
"""Axes of a pool in the order of `PageContent`, and back."""

KV_HEAD_AXIS = 4


def make_pool(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    is_latent: bool = False,
) -> Float[Array, "L pages page_size planes K H"] | QuantisedPool:
    """A zeroed pool: one array, keys and values of a token side by side, and one of their scales if quantised."""
    pages = jnp.zeros((num_layers, num_pages, page_size, 1 if is_latent else 2, num_kv_heads, head_dim), dtype)
    return QuantisedPool(pages, jnp.zeros(pages.shape[:-1])) if is_quantised(dtype) else pages


def unpack_pages(taken: Any, head_dim: int) -> PageContent:
    """The content of pages `[L, n, ...]` cut out of a pool."""
    if not isinstance(taken, QuantisedPool):
        return PageContent(jnp.transpose(taken, PAGE_FIRST), None)
    return PageContent(jnp.transpose(taken.pages, PAGE_FIRST), jnp.transpose(taken.scales, PAGE_FIRST[:-1]))


def pack_pages(content: PageContent) -> Any:
    """`unpack_pages` undone; the order of axes is its own inverse."""
    if content.scales is None:
        return jnp.transpose(content.values, PAGE_FIRST)
    return QuantisedPool(jnp.transpose(content.values, PAGE_FIRST), jnp.transpose(content.scales, PAGE_FIRST[:-1]))


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pool: Float[Array, "L pages page_size planes K H"] | QuantisedPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    value_dim: int | None = None,
) -> tuple[Float[Array, "T N V"], Float[Array, "L pages page_size planes K H"] | QuantisedPool]:
    """Attention of every query token, and the pool with this step's keys and values."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    num_pages, page_size = jax.tree.leaves(pool)[0].shape[1:3]
    places = token_places(metadata, num_tokens)

    pages = metadata.page_table[places.rows, places.positions // page_size]
    pages = jnp.where(places.is_real, pages, num_pages)  # out of range: a padding token is not written
    new, target = jnp.stack([k] if v is None else [k, v], axis=1), (layer, pages, places.positions % page_size)
    if isinstance(pool, QuantisedPool):
        values, scales = quantise(new, pool.pages.dtype)
        pool = QuantisedPool(
            pool.pages.at[target].set(values, mode="drop"), pool.scales.at[target].set(scales, mode="drop")
        )
    else:
        pool = pool.at[target].set(new.astype(pool.dtype), mode="drop")

    def cached_tokens(row: Array) -> Float[Array, "S planes K H"]:
        pages, scales = pool if isinstance(pool, QuantisedPool) else (pool, None)
        cached = pages[layer, metadata.page_table[row]].astype(jnp.float32)
        if scales is not None:
            cached = cached * scales[layer, metadata.page_table[row]][..., None]
        return cached.reshape(-1, new.shape[1], num_kv_heads, head_dim)

    def attend(token: tuple[Array, Array, Array, Array]) -> Array:
        query, row, position, is_real = token
        cached = cached_tokens(row)
        kv_positions = jnp.arange(cached.shape[0])
        visible = (kv_positions <= position) & is_real
        if window is not None:
            visible &= (kv_positions > position - window) | (jnp.asarray(window) <= 0)
        cached = jnp.where(visible[:, None, None, None], cached, 0.0)
        keys, values = cached[:, 0], cached[:, -1, :, :value_dim]  # [S, K, H] and [S, K, V]
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
        return jnp.einsum("kgs,skh->kgh", weights, values).reshape(num_heads, -1)

    out = jax.lax.map(attend, (q, places.rows, places.positions, places.is_real))
    return out.astype(q.dtype), pool
