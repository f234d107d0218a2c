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
from pallas_kernels.ragged_paged_attention.page_transfer import PageContent
from pallas_kernels.ragged_paged_attention.quantisation import QuantisedPool, is_quantised, quantise
from pallas_kernels.ragged_paged_attention.xla_decode import attend_decode, list_items
from pallas_kernels.ragged_paged_attention.xla_prefill import attend_prefill, list_tiles
from pallas_kernels.ragged_paged_attention.xla_tiling import LayerPages, choose_tiling

BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(jnp.float8_e4m3fn): jnp.uint8}
"""Types whose bits are kept, and as what."""
HELD = {jnp.dtype(bits): dtype for dtype, bits in BITS.items()}
"""Types that bits stand for."""

PAGE_FIRST = (1, 0, 2, 4, 3, 5)
"""Axes of `[L, n, planes, K, page_size, H]` in the order of `PageContent`, and back."""

TOKENWISE = 8
"""Batches of up to so many tokens run each token as a row of its own: the prefill loop stays out of the program."""

KV_HEAD_AXIS = 2


def make_pool(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    is_latent: bool = False,
) -> Num[Array, "L pages planes*K page_size H"] | QuantisedPool:
    """A zeroed pool: one array, a page's keys then its values, each kv head's tokens side by side; scales likewise.

    A latent pool has one row of tokens a page, which is how others know it: those have an even number.
    What XLA:CPU would convert to float32 and back at every write, the whole pool of it, is kept as bits.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.float16, *BITS, jnp.int8):
        raise NotImplementedError(
            f"The xla backend holds KV pages in float32, bfloat16, float16, int8 or float8_e4m3fn, got {dtype}."
        )
    rows = 1 if is_latent else 2 * num_kv_heads
    pages = jnp.zeros((num_layers, num_pages, rows, page_size, head_dim), BITS.get(dtype, dtype))
    return QuantisedPool(pages, jnp.zeros(pages.shape[:-1])) if is_quantised(dtype) else pages


def unpack_pages(taken: Any, head_dim: int) -> PageContent:
    """The content of pages `[L, n, ...]` cut out of a pool."""
    values, scales = taken if isinstance(taken, QuantisedPool) else (taken, None)
    num_layers, num_pages, heads, page_size, _ = values.shape
    num_planes = 1 if heads == 1 else 2
    shape = (num_layers, num_pages, num_planes, heads // num_planes, page_size)
    if values.dtype in HELD:
        values = lax.bitcast_convert_type(values, HELD[values.dtype])
    values = jnp.transpose(values.reshape(*shape, head_dim), PAGE_FIRST)
    return PageContent(values, None if scales is None else jnp.transpose(scales.reshape(shape), PAGE_FIRST[:-1]))


def pack_pages(content: PageContent) -> Any:
    """`unpack_pages` undone."""
    values = jnp.transpose(content.values, PAGE_FIRST)  # [L, n, planes, K, page_size, H]
    values = values.reshape(*values.shape[:2], -1, *values.shape[4:])
    if values.dtype in BITS:
        values = lax.bitcast_convert_type(values, BITS[values.dtype])
    if content.scales is None:
        return values
    return QuantisedPool(values, jnp.transpose(content.scales, PAGE_FIRST[:-1]).reshape(values.shape[:-1]))


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pool: Num[Array, "L pages planes*K page_size H"] | QuantisedPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    value_dim: int | None = None,
) -> tuple[Float[Array, "T N V"], Num[Array, "L pages planes*K page_size H"] | QuantisedPool]:
    """Attention of every query token, and the pool with this step's keys and values."""
    layer = jnp.asarray(layer, jnp.int32)
    if window is not None:
        window = jnp.asarray(window, jnp.int32)
    out, pool = _attention(q, k, v, pool, layer, metadata, scale, window, softcap, sinks)
    # What weights make of a whole key; cutting every key they meet would copy it.
    return out if value_dim is None else out[:, :, :value_dim], pool


# One trace for all layers of an unrolled model: what differs between them is an array.
@partial(jax.jit, static_argnames=("scale", "softcap"))
def _attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pool: Num[Array, "L pages planes*K page_size H"] | QuantisedPool,
    layer: Int32[Array, ""],
    metadata: AttentionMetadata,
    scale: float,
    window: Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> tuple[Float[Array, "T N H"], Num[Array, "L pages planes*K page_size H"] | QuantisedPool]:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    _, num_pages, _, page_size, *_ = jax.tree.leaves(pool)[0].shape
    num_rows, width = metadata.page_table.shape
    tiling = choose_tiling(num_tokens, num_heads, num_kv_heads, head_dim, page_size, width)
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}

    places = token_places(metadata, num_tokens)
    pool = write(pool, layer, k, v, places, metadata)
    values, scales = pool if isinstance(pool, QuantisedPool) else (pool, None)
    pages = LayerPages(
        values.reshape(-1, page_size * head_dim), None if scales is None else scales.reshape(-1, page_size),
        layer * num_pages, num_kv_heads, page_size, head_dim, v is None,
    )  # fmt: skip
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
    pool: Num[Array, "L pages planes*K page_size H"] | QuantisedPool,
    layer: Int32[Array, ""],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    places: TokenPlaces,
    metadata: AttentionMetadata,
) -> Num[Array, "L pages planes*K page_size H"] | QuantisedPool:
    """The pool with the real tokens' keys and values in their places."""
    new = k if v is None else jnp.concatenate([k, v], axis=1)
    if isinstance(pool, QuantisedPool):
        values, scales = quantise(new, HELD.get(pool.pages.dtype, pool.pages.dtype))
    else:
        values, scales = new.astype(HELD.get(pool.dtype, pool.dtype)), None
    if values.dtype in BITS:
        values = lax.bitcast_convert_type(values, BITS[values.dtype])
    pages = pool.pages if isinstance(pool, QuantisedPool) else pool
    num_pages, num_heads, page_size, head_dim = pages.shape[1:]
    # One axis for layer, page, head and token: XLA:CPU then updates the pool in place, at any number of tokens.
    page = layer * num_pages + metadata.page_table[places.rows, places.positions // page_size]
    lines = (page[:, None] * num_heads + jnp.arange(num_heads)[None, :]) * page_size
    lines = lines + (places.positions % page_size)[:, None]
    lines = jnp.where(places.is_real[:, None], lines, pages.size // head_dim)  # out of range: dropped
    pages = pages.reshape(-1, head_dim).at[lines].set(values, mode="drop").reshape(pages.shape)
    if not isinstance(pool, QuantisedPool):
        return pages
    return QuantisedPool(pages, pool.scales.reshape(-1).at[lines].set(scales, mode="drop").reshape(pool.scales.shape))
