"""The TPU backend: two Pallas kernels, `tpu_decode` (and every write) then `tpu_mixed`, on the pool of all layers.

Pages are `[L, pages, K, page_size, C]`: a page is one contiguous copy, and a kv head's tokens in it are whole
hardware tiles that the matrix unit reads as they lie (`tpu_tuning.PageLayout`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention import tpu_decode, tpu_mixed, tpu_tuning, tpu_write
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.tpu_softmax import Logits
from pallas_kernels.ragged_paged_attention.tpu_tuning import LANES, Chip, Config, PageLayout, Shape


def make_pool(
    *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> Float[Array, "L pages K page_size C"]:
    """A zeroed pool: one array, a token's key and value side by side in lanes."""
    return jnp.zeros((num_layers, num_pages, num_kv_heads, page_size, PageLayout(head_dim).lanes), dtype)


def copy_pages(
    pool: Float[Array, "L pages K page_size C"], src: Int32[Array, " C"], dst: Int32[Array, " C"]
) -> Float[Array, "L pages K page_size C"]:
    """The pool with page `src[c]` copied to page `dst[c]` in every layer; out-of-range `dst` are dropped."""
    num_layers, num_pages = pool.shape[:2]
    flat = pool.reshape(-1, *pool.shape[2:])
    first = (jnp.arange(num_layers, dtype=jnp.int32) * num_pages)[:, None]
    is_kept = (dst >= 0) & (dst < num_pages)
    target = jnp.where(is_kept[None, :], first + dst[None, :], flat.shape[0]).reshape(-1)
    source = (first + jnp.clip(src, 0, num_pages - 1)[None, :]).reshape(-1)
    return flat.at[target].set(flat[source], mode="drop").reshape(pool.shape)


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Float[Array, "L pages K page_size C"],
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
    interpret: Any = False,
    config: Config | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "L pages K page_size C"]]:
    """Attention of every query token, and the pool with this step's keys and values.

    Queries are rounded to the pool's dtype before they meet the keys, as are probabilities before the values. A page
    that a decode row writes must be read by no other decode row of the same step.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    num_rows, width = metadata.page_table.shape
    shape = Shape(num_tokens, num_rows, num_heads, num_kv_heads, head_dim, pool.shape[3], width, pool.dtype)
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
    new = _place_new(k, v, shape.layout).astype(pool.dtype)
    padding = -num_tokens % (config.query_tokens * chip.num_cores)
    queries = _pad_last(q.reshape(num_tokens, num_kv_heads, shape.groups, head_dim), shape.layout.head_lanes)
    queries = jnp.pad(queries, ((0, padding), (0, 0), (0, 0), (0, 0))).astype(pool.dtype)  # [T, K, G, lanes]

    decoded, pool = tpu_decode.decode(
        queries,
        jnp.pad(new, ((0, padding), (0, 0), (0, 0))),
        tpu_write.pad_new(new.astype(jnp.float32), config.write_tokens),
        pool,
        _spread_sinks(sinks, num_kv_heads, 1),
        scalars, shape, config, Logits(scale, softcap, shape.layout, config.decode_block_pages),
        chip.num_cores, interpret,
    )  # fmt: skip
    out = tpu_mixed.mixed(
        queries,
        decoded,
        pool,
        _spread_sinks(sinks, num_kv_heads, config.query_tokens),
        scalars, shape, config, Logits(scale, softcap, shape.layout, config.mixed_block_pages),
        chip.num_cores, interpret,
    )  # fmt: skip
    first = shape.layout.result_start
    return out[:num_tokens, :, :, first : first + head_dim].reshape(q.shape).astype(q.dtype), pool


def _pad_last(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _place_new(k: Float[Array, "T K H"], v: Float[Array, "T K H"], layout: PageLayout) -> Float[Array, "T K C"]:
    """Keys and values as they lie in a page."""
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
