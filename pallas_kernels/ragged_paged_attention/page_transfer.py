"""Whole pages on the move: copied within a pool, and out of and into it in one form that all backends share."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num


class PageContent(NamedTuple):
    """What n pages hold, page by page and whatever the backend: first all of a page's layers, then its next."""

    values: Num[Array, "n L planes page_size K H"]
    """Keys (plane 0) and values (plane 1), in the pool's dtype."""
    scales: Float[Array, "n L planes page_size K"] | None
    """What a quantised pool's values are multiplied by; None for other pools."""


def copy_pages(pool: Any, src: Int32[Array, " C"], dst: Int32[Array, " C"]) -> Any:
    """The pool with page `src[c]` copied to `dst[c]` in every layer; out-of-range `dst` are dropped."""
    return jax.tree.map(lambda leaf: _put(leaf, dst, _take(leaf, src)), pool)


def export_pages(pool: Any, pages: Int32[Array, " n"], backend: ModuleType, head_dim: int) -> PageContent:
    """The content of pages, which must be in range."""
    return backend.unpack_pages(jax.tree.map(lambda leaf: _take(leaf, pages), pool), head_dim)


def import_pages(pool: Any, pages: Int32[Array, " n"], content: PageContent, backend: ModuleType) -> Any:
    """The pool with the content in its pages; out-of-range pages are dropped."""
    new = backend.pack_pages(content)
    wanted, got = (jax.tree.map(lambda leaf: (leaf.shape[0], *leaf.shape[2:]), x) for x in (pool, new))
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(x)] for x in (pool, new)]
    if jax.tree.structure(pool) != jax.tree.structure(new) or wanted != got or dtypes[0] != dtypes[1]:
        raise ValueError(
            f"the content must be of pages like the pool's, {wanted} of {dtypes[0]}, got {got} of {dtypes[1]}."
        )
    return jax.tree.map(lambda leaf, rows: _put(leaf, pages, rows), pool, new)


def _take(leaf: jax.Array, pages: Int32[Array, " n"]) -> jax.Array:
    """`[L, n, ...]` of a pool's `[L, pages, ...]`."""
    num_layers, num_pages = leaf.shape[:2]
    rows = _rows(num_layers, num_pages, jnp.clip(pages, 0, num_pages - 1))
    return leaf.reshape(-1, *leaf.shape[2:])[rows].reshape(num_layers, pages.size, *leaf.shape[2:])


def _put(leaf: jax.Array, pages: Int32[Array, " n"], new: jax.Array) -> jax.Array:
    # Layers and pages as one axis: a scatter on the second axis would copy the pool on XLA:CPU.
    num_layers, num_pages = leaf.shape[:2]
    is_kept = (pages >= 0) & (pages < num_pages)
    rows = _rows(num_layers, num_pages, pages)
    rows = jnp.where(jnp.tile(is_kept, num_layers), rows, num_layers * num_pages)
    flat = leaf.reshape(-1, *leaf.shape[2:])
    return flat.at[rows].set(new.reshape(-1, *leaf.shape[2:]), mode="drop").reshape(leaf.shape)


def _rows(num_layers: int, num_pages: int, pages: Int32[Array, " n"]) -> Int32[Array, " L*n"]:
    first = (jnp.arange(num_layers, dtype=jnp.int32) * num_pages)[:, None]
    return (first + pages[None, :]).reshape(-1)
