"""The oracle: every token against every token, and a mask."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def ragged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cu_lens: Int32[Array, " R+1"],
    *,
    scale: float,
    is_causal: bool,
    window: int | Int32[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N H"]:
    """Attention of each token over its own row's tokens."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    tokens = jnp.arange(num_tokens)
    rows = jnp.searchsorted(cu_lens[1:], tokens, side="right")
    is_real = tokens < cu_lens[-1]
    q, k, v = (jnp.where(is_real[:, None, None], x, 0.0).astype(jnp.float32) for x in (q, k, v))
    distance = tokens[:, None] - tokens[None, :]
    visible = (rows[:, None] == rows[None, :]) & is_real[:, None]
    if is_causal:
        visible &= distance >= 0
    if window is not None:
        visible &= (jnp.abs(distance) < window) | (jnp.asarray(window) <= 0)
    logits = scale * jnp.einsum("tkgh,skh->kgts", q.reshape(num_tokens, num_kv_heads, -1, head_dim), k)
    logits = logits.reshape(num_heads, num_tokens, num_tokens)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(visible[None], logits, -jnp.inf)
    sink = jnp.full((num_heads, 1, 1), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)[:, None, None]
    peak = jnp.where(is_real[None, :, None], jnp.maximum(logits.max(axis=2, keepdims=True), sink), 0.0)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=2, keepdims=True) + jnp.where(is_real[None, :, None], jnp.exp(sink - peak), 1.0)
    weights = (weights / total).reshape(num_kv_heads, -1, num_tokens, num_tokens)
    out = jnp.einsum("kgts,skh->tkgh", weights, v)
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
