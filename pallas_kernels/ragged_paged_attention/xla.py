"""Paged attention in plain XLA, shaped for CPUs: time follows the real lengths, not the size of pool or page table.

`xla_decode` has the rows of one query token, `xla_prefill` the longer ones; docs/attention-cpu.md has the measurements
behind the pool's layout and the sizes of the loops' steps.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata, TokenPlaces, token_places
from pallas_kernels.ragged_paged_attention.xla_decode import attend_decode, list_items
from pallas_kernels.ragged_paged_attention.xla_prefill import attend_prefill, list_tiles
from pallas_kernels.ragged_paged_attention.xla_tiling import LayerPages, choose_tiling

TOKENWISE = 8
"""Batches of up to so many tokens run each token as a row of its own: the prefill loop stays out of the program."""


def make_pool(
    *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> Num[Array, "L pages 2*K page_size H"]:
    """A zeroed pool: one array, a page's keys then its values, each kv head's tokens side by side.

    bfloat16 is kept as its bits: XLA:CPU would convert the whole pool to float32 and back at every write.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"The xla backend holds KV pages in float32, bfloat16 or float16, got {dtype}.")
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    return jnp.zeros((num_layers, num_pages, 2 * num_kv_heads, page_size, head_dim), stored)


def copy_pages(
    pool: Num[Array, "L pages 2*K page_size H"], src: Int32[Array, " C"], dst: Int32[Array, " C"]
) -> Num[Array, "L pages 2*K page_size H"]:
    """The pool with page `src[c]` copied to page `dst[c]` in every layer; out-of-range `dst` are dropped."""
    num_layers, num_pages = pool.shape[:2]
    # Layers and pages as one axis: a scatter on the second axis would copy the pool.
    flat = pool.reshape(num_layers * num_pages, -1)
    first = (jnp.arange(num_layers, dtype=jnp.int32) * num_pages)[:, None]
    is_kept = (dst >= 0) & (dst < num_pages)
    target = jnp.where(is_kept[None, :], first + dst[None, :], flat.shape[0]).reshape(-1)
    source = (first + jnp.clip(src, 0, num_pages - 1)[None, :]).reshape(-1)
    return flat.at[target].set(flat[source], mode="drop").reshape(pool.shape)


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Num[Array, "L pages 2*K page_size H"],
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "T N H"], Num[Array, "L pages 2*K page_size H"]]:
    """Attention of every query token, and the pool with this step's keys and values."""
    layer = jnp.asarray(layer, jnp.int32)
    if window is not None:
        window = jnp.asarray(window, jnp.int32)
    return _attention(q, k, v, pool, layer, metadata, scale, window, softcap, sinks)


# One trace for all layers of an unrolled model: what differs between them is an array.
@partial(jax.jit, static_argnames=("scale", "softcap"))
def _attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Num[Array, "L pages 2*K page_size H"],
    layer: Int32[Array, ""],
    metadata: AttentionMetadata,
    scale: float,
    window: Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "T N H"], Num[Array, "L pages 2*K page_size H"]]:
    num_tokens, num_heads, head_dim = q.shape
    num_pages, num_kv_heads, page_size = pool.shape[1], k.shape[1], pool.shape[3]
    num_rows, width = metadata.page_table.shape
    tiling = choose_tiling(num_tokens, num_heads, num_kv_heads, head_dim, page_size, width)
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}

    places = token_places(metadata, num_tokens)
    pool = write(pool, layer, k, v, places, metadata)
    pages = LayerPages(pool.reshape(-1, page_size * head_dim), layer * num_pages, num_kv_heads, page_size, head_dim)
    scaled = q.astype(jnp.float32) * scale

    if num_tokens <= TOKENWISE:
        kv_lens = jnp.where(places.is_real, places.positions + 1, 0)
        items = list_items(kv_lens, metadata.page_table[places.rows], page_size, tiling, window)
        return attend_decode(scaled, kv_lens, items, pages, tiling, **options).astype(q.dtype), pool

    most = min(num_rows, num_tokens)
    kv_lens = jnp.where(jnp.arange(most) < metadata.num_decode_rows, metadata.kv_lens[:most], 0)
    items = list_items(kv_lens, metadata.page_table[:most], page_size, tiling, window)
    out = attend_decode(scaled[:most], kv_lens, items, pages, tiling, **options)
    padding = num_tokens + tiling.tile - most
    out = jnp.concatenate([out, jnp.zeros((padding, num_heads, head_dim))])
    scaled = jnp.concatenate([scaled, jnp.zeros((tiling.tile, num_heads, head_dim))])
    tiles = list_tiles(metadata, num_tokens, tiling.tile)
    out = attend_prefill(scaled, out, tiles, metadata, pages, tiling, **options)
    return out[:num_tokens].astype(q.dtype), pool


def write(
    pool: Num[Array, "L pages 2*K page_size H"],
    layer: Int32[Array, ""],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    places: TokenPlaces,
    metadata: AttentionMetadata,
) -> Num[Array, "L pages 2*K page_size H"]:
    """The pool with the real tokens' keys and values in their places."""
    num_pages, num_heads, page_size, head_dim = pool.shape[1:]
    # One axis for layer, page, head and token: XLA:CPU then updates the pool in place, at any number of tokens.
    flat = pool.reshape(-1, head_dim)
    pages = layer * num_pages + metadata.page_table[places.rows, places.positions // page_size]
    lines = (pages[:, None] * num_heads + jnp.arange(num_heads)[None, :]) * page_size
    lines = lines + (places.positions % page_size)[:, None]
    lines = jnp.where(places.is_real[:, None], lines, flat.shape[0])  # out of range: dropped
    new = jnp.concatenate([k, v], axis=1)
    if pool.dtype == jnp.uint16:
        new = lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16)
    else:
        new = new.astype(pool.dtype)
    return flat.at[lines].set(new, mode="drop").reshape(pool.shape)
