"""The TPU backend: two Pallas kernels, `tpu_decode` (and every write) then `tpu_mixed`, on the pool of all layers.

Pages are `[L, pages, K, page_size, C]`: a page is one contiguous copy, and a kv head's tokens in it are whole
hardware tiles that the matrix unit reads as they lie (`tpu_tuning.PageLayout`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention import tpu_decode, tpu_mixed, tpu_scales, tpu_tuning, tpu_write
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.page_transfer import PageContent
from pallas_kernels.ragged_paged_attention.quantisation import QuantisedPool, is_quantised, quantise
from pallas_kernels.ragged_paged_attention.tpu_softmax import Logits
from pallas_kernels.ragged_paged_attention.tpu_tuning import (
    LANES,
    Chip,
    Config,
    PageLayout,
    Shape,
    round_up,
    scale_rows,
)

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
) -> Float[Array, "L pages K page_size C"] | QuantisedPool:
    """A zeroed pool: one array, a token's key and value side by side in lanes.

    Scales are `[L, pages, rows, lanes]`: a row for a head's keys, then one for its values, a page's tokens in lanes.
    """
    tpu_tuning.check_pages(page_size, dtype)
    layout = PageLayout(head_dim, is_latent)
    pages = jnp.zeros((num_layers, num_pages, num_kv_heads, page_size, layout.lanes), dtype)
    if not is_quantised(dtype):
        return pages
    if is_latent:
        raise NotImplementedError(f"The tpu backend holds latents in bfloat16 or float32, got {jnp.dtype(dtype)}.")
    shape = (num_layers, num_pages, scale_rows(num_kv_heads), round_up(page_size, LANES))
    return QuantisedPool(pages, jnp.zeros(shape))


def unpack_pages(taken: Any, head_dim: int) -> PageContent:
    """The content of pages `[L, n, ...]` cut out of a pool."""
    pages, scales = taken if isinstance(taken, QuantisedPool) else (taken, None)
    num_layers, num_pages, num_kv_heads, page_size, lanes = pages.shape
    # A latent of up to 64 channels has as many lanes as a key and a value; it leaves as a key and a value of zeros.
    starts = [0] if lanes < PageLayout(head_dim).lanes else [0, PageLayout(head_dim).value_start]
    planes = jnp.stack([pages[..., start : start + head_dim] for start in starts])  # [planes, L, n, K, page_size, H]
    values = jnp.transpose(planes, (2, 1, 0, 4, 3, 5))
    if scales is None:
        return PageContent(values, None)
    scales = scales[..., : 2 * num_kv_heads, :page_size].reshape(num_layers, num_pages, num_kv_heads, 2, page_size)
    return PageContent(values, jnp.transpose(scales, (1, 0, 3, 4, 2)))


def pack_pages(content: PageContent) -> Any:
    """`unpack_pages` undone."""
    keys, *rest = jnp.transpose(content.values, (2, 1, 0, 4, 3, 5))
    pages = _place(keys, rest[0] if rest else None, PageLayout(keys.shape[-1], is_latent=not rest))
    if content.scales is None:
        return pages
    scales = jnp.transpose(content.scales, (1, 0, 4, 2, 3))  # [L, n, K, 2, page_size]
    scales = scales.reshape(*scales.shape[:2], -1, scales.shape[-1])
    more = scale_rows(content.scales.shape[-1]) - scales.shape[2]
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, more), (0, 0)))
    return QuantisedPool(pages, _pad_last(scales, round_up(scales.shape[-1], LANES)))


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pool: Float[Array, "L pages K page_size C"] | QuantisedPool,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    value_dim: int | None = None,
    interpret: Any = False,
    config: Config | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "L pages K page_size C"] | QuantisedPool]:
    """Attention of every query token, and the pool with this step's keys and values.

    Queries are rounded to the pool's dtype (bfloat16 if it is quantised) before they meet the keys, as are
    probabilities before the values. A page that a decode row writes must be read by no other decode row of the step.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    num_rows, width = metadata.page_table.shape
    pages = jax.tree.leaves(pool)[0]
    sizes = (num_tokens, num_rows, num_heads, num_kv_heads, head_dim, pages.shape[3], width, pages.dtype)
    shape = Shape(*sizes, is_latent=v is None)
    chip = tpu_tuning.INTERPRETED if interpret else Chip.current()
    config = tpu_tuning.choose(shape, chip) if config is None else config
    metadata = AttentionMetadata(*(x.astype(jnp.int32) for x in metadata))
    scalars = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "window": jnp.asarray(0 if window is None else window, jnp.int32).reshape(1),
        "num_decode_rows": metadata.num_decode_rows.reshape(1),
        "cu_q_lens": metadata.cu_q_lens,
        "kv_lens": metadata.kv_lens,
        "table": metadata.page_table.reshape(-1),
    }
    padding = -num_tokens % (config.query_tokens * chip.num_cores)
    queries = _pad_last(q.reshape(num_tokens, num_kv_heads, shape.groups, head_dim), shape.layout.head_lanes)
    queries = _pad_first(queries, padding).astype(shape.compute_dtype)  # [T, K, G, lanes]
    decoded, leaves = tpu_decode.decode(
        queries,
        _new(k, v, padding, shape, config),
        jax.tree.leaves(pool),
        _spread_sinks(sinks, num_kv_heads, 1),
        scalars, shape, config, Logits(scale, softcap, shape.layout, config.decode_block_pages),
        chip.num_cores, interpret,
    )  # fmt: skip
    out = tpu_mixed.mixed(
        queries,
        decoded,
        leaves,
        _spread_sinks(sinks, num_kv_heads, config.query_tokens),
        scalars, shape, config, Logits(scale, softcap, shape.layout, config.mixed_block_pages),
        chip.num_cores, interpret,
    )  # fmt: skip
    pool = jax.tree.unflatten(jax.tree.structure(pool), leaves)
    first = shape.layout.result_start
    out = out[:num_tokens, :, :, first : first + (value_dim or head_dim)]
    return out.reshape(*q.shape[:2], -1).astype(q.dtype), pool


def _new(
    k: Float[Array, "T K H"], v: Float[Array, "T K H"] | None, padding: int, shape: Shape, config: Config
) -> tpu_decode.New:
    """The step's keys and values as the kernels take them, `padding` tokens more for decode rows."""
    if v is None or not shape.is_quantised:
        new = _place(k, v, shape.layout).astype(shape.pool_dtype)
        return tpu_decode.New(_pad_first(new, padding), tpu_write.pad_new(new.astype(jnp.float32), config.write_tokens))
    (keys, key_scales), (values, value_scales) = quantise(k, shape.pool_dtype), quantise(v, shape.pool_dtype)
    new = _place(keys.astype(jnp.float32), values.astype(jnp.float32), shape.layout)
    scales = jnp.stack([key_scales, value_scales], axis=2).reshape(shape.num_tokens, -1)
    scales = _pad_last(scales, shape.scale_rows)
    return tpu_decode.New(
        _pad_first(new, padding).astype(shape.compute_dtype),
        tpu_write.pad_new(new, config.write_tokens),
        jnp.broadcast_to(
            _pad_first(scales, padding)[:, :, None], (shape.num_tokens + padding, *scales.shape[1:], LANES)
        ),
        tpu_scales.pad_new_scales(scales, shape),
    )


def _pad_first(x: jax.Array, more: int) -> jax.Array:
    return jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1))


def _pad_last(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _place(k: Float[Array, "*N H"], v: Float[Array, "*N H"] | None, layout: PageLayout) -> Float[Array, "*N C"]:
    """Keys and values as they lie in a page, or keys alone."""
    if v is None:
        return _pad_last(k, layout.lanes)
    key = _pad_last(k, layout.value_start)
    return jnp.concatenate([key, _pad_last(v, layout.lanes - layout.value_start)], axis=-1)


def _spread_sinks(
    sinks: Float[Array, " N"] | None, num_kv_heads: int, repeats: int
) -> Float[Array, "K rows lanes"] | None:
    """The sink of every query row of a kv head, in all lanes."""
    if sinks is None:
        return None
    rows = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), (1, repeats))
    return jnp.broadcast_to(rows[:, :, None], (*rows.shape, LANES))
