"""Ragged paged attention: write a step's keys and values into their pages, attend over each row's pages.

One signature for every backend; a backend is one module of this folder with `make_pool`, `unpack_pages`, `pack_pages`
and `ragged_paged_attention`, and its file name is the name that callers pass.
"""

import importlib
import math
import pkgutil
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention import page_transfer
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.page_transfer import PageContent

__all__ = [
    "AttentionMetadata",
    "PageContent",
    "backends",
    "copy_pages",
    "export_pages",
    "import_pages",
    "kv_head_axis",
    "make_pool",
    "pool_bytes_per_page",
    "ragged_paged_attention",
]

NOT_BACKENDS = {"metadata", "bench", "quantisation"}


def backends() -> list[str]:
    """Names of the backends that exist, found without importing them."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in NOT_BACKENDS and "_" not in m.name)


def _backend(name: str) -> ModuleType:
    if name not in backends():
        raise ValueError(f"backend must be one of {', '.join(backends())}, got {name!r}.")
    return importlib.import_module(f"{__name__}.{name}")


def make_pool(
    backend: str,
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    is_latent: bool = False,
) -> Any:
    """A zeroed KV pool: a pytree of arrays `[layers, pages, ...]` whose layout belongs to the backend.

    Pages of int8 and float8_e4m3fn come with their scales (`quantisation`). A latent pool keeps one vector a token,
    for `ragged_paged_attention` without values.
    """
    sizes = {
        "num_layers": num_layers,
        "num_pages": num_pages,
        "page_size": page_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    if is_latent and num_kv_heads != 1:
        raise ValueError(f"a latent pool has one kv head, got {num_kv_heads}.")
    return _backend(backend).make_pool(**sizes, dtype=dtype, is_latent=is_latent)


def kv_head_axis(backend: str) -> int:
    """The axis of every array of a pool that has the kv heads, and may be split evenly among devices.

    A device's part is a pool of its own, with fewer heads: attention must run on each part alone (`shard_map`).
    """
    return _backend(backend).KV_HEAD_AXIS


def pool_bytes_per_page(
    backend: str,
    *,
    num_layers: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    is_latent: bool = False,
) -> int:
    """Bytes that one page takes in a pool of the backend, over all layers."""

    def one_page() -> Any:
        return make_pool(
            backend, num_layers=num_layers, num_pages=1, page_size=page_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim, dtype=dtype, is_latent=is_latent,
        )  # fmt: skip

    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(one_page)))


def copy_pages(pool: Any, src: Int32[Array, " C"], dst: Int32[Array, " C"], backend: str) -> Any:
    """The pool with page `src[c]` copied to `dst[c]` in every layer; entries with `dst` out of range are dropped."""
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"src and dst must be vectors of one length, got shapes {src.shape} and {dst.shape}.")
    _backend(backend)
    return page_transfer.copy_pages(pool, src, dst)


def export_pages(pool: Any, pages: Int32[Array, " n"], backend: str, *, head_dim: int) -> PageContent:
    """What the pages hold, in a form that no backend owns: for host memory, other pools, other machines.

    Every page must be in range. `import_pages` takes it into a pool of any backend with the same sizes and dtype, bit
    for bit.
    """
    return page_transfer.export_pages(pool, pages, _backend(backend), head_dim)


def import_pages(pool: Any, pages: Int32[Array, " n"], content: PageContent, backend: str) -> Any:
    """The pool with `content[i]` as page `pages[i]`; entries out of range are dropped."""
    if pages.shape != content.values.shape[:1]:
        raise ValueError(f"pages must be a vector, one for each of {content.values.shape[0]}, got shape {pages.shape}.")
    return page_transfer.import_pages(pool, pages, content, _backend(backend))


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pool: Any,
    layer: int | Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | Int32[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    value_dim: int | None = None,
    backend: str = "xla",
) -> tuple[Float[Array, "T N V"], Any]:
    """Causal attention of each row's query tokens over its pages, and the pool with k and v written.

    Query head n reads kv head `n // (N // K)`. A `window` W > 0 lets position p see (p - W, p]; logits become
    `softcap * tanh(logits / softcap)`; `sinks` are logits that join the softmax's denominator only.

    With v None, the pool is a latent one: the first `value_dim` channels of a key are the value too, and the result's.
    """
    _check(q, k, v, metadata, softcap, sinks)
    size = q.shape[2] if value_dim is None else value_dim
    if (v is None) != (value_dim is not None) or not 1 <= size <= q.shape[2]:
        raise ValueError(f"value_dim must be given instead of v, from 1 to {q.shape[2]}, got {value_dim}.")
    if v is None and k.shape[1] != 1:
        raise ValueError(f"latent attention has one kv head, got {k.shape[1]}.")
    if isinstance(window, int) and window <= 0:
        window = None
    return _backend(backend).ragged_paged_attention(
        q, k, v, pool, layer, metadata, scale=scale, window=window, softcap=softcap, sinks=sinks, value_dim=value_dim
    )


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    metadata: AttentionMetadata,
    softcap: float | None,
    sinks: jax.Array | None,
) -> None:
    shapes = [q.shape, k.shape, k.shape if v is None else v.shape]
    if q.ndim != 3 or k.ndim != 3 or shapes[1] != shapes[2] or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError("q [T, N, H] and k, v [T, K, H] must agree, got {}, {}, {}.".format(*shapes))
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {q.shape[1]}, {k.shape[1]}.")
    num_rows = metadata.kv_lens.shape[0]
    if metadata.cu_q_lens.shape != (num_rows + 1,) or metadata.page_table.shape[:1] != (num_rows,):
        raise ValueError(
            f"metadata must have R + 1, R and R rows, got cu_q_lens {metadata.cu_q_lens.shape}, kv_lens "
            f"{metadata.kv_lens.shape}, page_table {metadata.page_table.shape}."
        )
    for leaf in metadata:
        if not jnp.issubdtype(leaf.dtype, jnp.integer):
            raise ValueError(f"metadata must hold integers, got {leaf.dtype}.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0 or None, got {softcap}.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must have one logit per query head, {q.shape[1:2]}, got {sinks.shape}.")
