"""Attention among the tokens of one ragged batch, nothing cached: what encoders and embedding models need.

Backends: `reference` (the oracle) and `xla`.
"""

import importlib
import pkgutil

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

__all__ = ["backends", "ragged_attention"]


def backends() -> list[str]:
    """The implementations that can be asked for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def ragged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cu_lens: Int32[Array, " R+1"],
    *,
    scale: float,
    is_causal: bool,
    window: int | Int32[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    backend: str = "xla",
) -> Float[Array, "T N H"]:
    """Attention of each token over its own row's tokens; row r is tokens `cu_lens[r]` to `cu_lens[r + 1]`.

    Query head n reads kv head `n // (N // K)`. A `window` W > 0 lets tokens see others less than W away. Tokens from
    `cu_lens[-1]` on are padding: they get zeros, whatever they hold. `softcap` and `sinks` as in paged attention.
    """
    _check(q, k, v, cu_lens, softcap, sinks)
    if backend not in backends():
        raise ValueError(f"backend must be one of {', '.join(backends())}, got {backend!r}.")
    if isinstance(window, int) and window <= 0:
        window = None
    module = importlib.import_module(f"{__name__}.{backend}")
    return module.ragged_attention(
        q, k, v, cu_lens, scale=scale, is_causal=is_causal, window=window, softcap=softcap, sinks=sinks
    )


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, cu_lens: jax.Array, softcap: float | None, sinks: jax.Array | None
) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(f"q [T, N, H] and k, v [T, K, H] must agree, got {q.shape}, {k.shape}, {v.shape}.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {q.shape[1]}, {k.shape[1]}.")
    if cu_lens.ndim != 1 or cu_lens.shape[0] < 2 or not jnp.issubdtype(cu_lens.dtype, jnp.integer):
        raise ValueError(f"cu_lens must be R + 1 integers, got {cu_lens.dtype} {cu_lens.shape}.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0 or None, got {softcap}.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must have one logit per query head, {q.shape[1:2]}, got {sinks.shape}.")
