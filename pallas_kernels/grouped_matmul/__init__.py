"""Grouped matrix products: rows sorted by group, each multiplied with its group's matrix (the experts of a layer).

One signature for every backend; a backend is one module of this folder with `grouped_matmul`, and its file name is the
name that callers pass.
"""

import importlib
import pkgutil

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

__all__ = ["backends", "grouped_matmul"]

NOT_BACKENDS = {"groups"}


def backends() -> list[str]:
    """Names of the backends that exist, found without importing them."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in NOT_BACKENDS and "_" not in m.name)


def grouped_matmul(
    x: Float[Array, "T K"],
    weights: Float[Array, "G K N"],
    group_sizes: Int32[Array, " E"],
    *,
    first_group: int | Int32[Array, ""] = 0,
    backend: str = "ragged",
) -> Float[Array, "T N"]:
    """Row t of group e times `weights[first_group + e]`, summed in float32, in the type of `x`.

    The rows of group 0 come first, then those of group 1 …; any group may be empty, and what no row needs is not read
    (by the backends `cpu` and `tpu`). Rows behind the last group belong to nobody: their results are anything, NaN
    included. G may be larger than E: the matrices of several layers in one array.
    """
    _check(x, weights, group_sizes)
    if backend not in backends():
        raise ValueError(f"backend must be one of {', '.join(backends())}, got {backend!r}.")
    module = importlib.import_module(f"{__name__}.{backend}")
    return module.grouped_matmul(x, weights, group_sizes, jnp.asarray(first_group, jnp.int32)).astype(x.dtype)


def _check(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> None:
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"x [T, K] and weights [G, K, N] must agree, got {x.shape} and {weights.shape}.")
    if group_sizes.ndim != 1 or not 1 <= group_sizes.shape[0] <= weights.shape[0]:
        raise ValueError(
            f"group_sizes must have one entry a group, at most {weights.shape[0]}, got shape {group_sizes.shape}."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must hold integers, got {group_sizes.dtype}.")
