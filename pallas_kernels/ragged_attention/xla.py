"""Tiles of queries against tiles of keys in plain jnp, with a running softmax (FlashAttention, arXiv 2205.14135).

A tile of queries reads the keys from the first token of its first row to the last of its last, no others, and
tiles of nothing but padding are not run at all: the cost follows the rows' lengths, not the batch's size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

TILE = 64
"""Tokens in a tile. Longer ones waste more on short rows, shorter ones are less efficient products."""


class _Softmax(NamedTuple):
    """The running state of one tile of queries."""

    peak: Float[Array, "K Q"]
    total: Float[Array, "K Q"]
    out: Float[Array, "K Q H"]


class _Tiles(NamedTuple):
    """The batch cut up: i tiles of t tokens; G query heads a kv head."""

    q: Float[Array, "i K G t H"]
    k: Float[Array, "i K t H"]
    v: Float[Array, "i K t H"]
    starts: Int32[Array, "i t"]
    """First token of each token's row; for padding, the end of the batch, so that it sees nothing."""
    ends: Int32[Array, "i t"]


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
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    size = min(TILE, num_tokens)
    tiles = _cut(q, k, v, cu_lens, size)
    if window is not None:
        # 0 in an array of windows, one a layer, is no window.
        window = jnp.where(jnp.asarray(window) > 0, window, num_tokens)
    start = _start(sinks, num_kv_heads, num_heads // num_kv_heads, size, head_dim)

    def one_tile(index: Int32[Array, ""], out: Float[Array, "i K Q H"]) -> Float[Array, "i K Q H"]:
        query = tiles.q[index].reshape(num_kv_heads, -1, head_dim)
        queries = index * size + jnp.arange(size)
        first, last = tiles.starts[index, 0], jnp.max(tiles.ends[index])
        if is_causal:
            last = jnp.minimum(last, (index + 1) * size)
        if window is not None:
            first, last = (
                jnp.maximum(first, index * size - window + 1),
                jnp.minimum(last, index * size + size - 1 + window),
            )

        def one_block(block: Int32[Array, ""], state: _Softmax) -> _Softmax:
            keys = block * size + jnp.arange(size)
            visible = (keys[None, :] >= tiles.starts[index][:, None]) & (keys[None, :] < tiles.ends[index][:, None])
            distance = queries[:, None] - keys[None, :]
            if is_causal:
                visible &= distance >= 0
            if window is not None:
                visible &= jnp.abs(distance) < window
            logits = scale * jnp.einsum("kqh,ksh->kqs", query, tiles.k[block], preferred_element_type=jnp.float32)
            if softcap is not None:
                logits = softcap * jnp.tanh(logits / softcap)
            visible = jnp.tile(visible, (num_heads // num_kv_heads, 1))[None]
            return _take_in(state, logits, visible, tiles.v[block])

        state = jax.lax.fori_loop(first // size, -(-last // size), one_block, start)
        total = jnp.where(state.total > 0, state.total, 1.0)[..., None]  # a padding token saw nothing
        return out.at[index].set((state.out / total).astype(out.dtype))

    out = jnp.zeros((tiles.q.shape[0], *start.out.shape), q.dtype)
    out = jax.lax.fori_loop(0, -(-cu_lens[-1] // size), one_tile, out)
    out = out.reshape(-1, num_kv_heads, num_heads // num_kv_heads, size, head_dim)
    return jnp.moveaxis(out, 3, 1).reshape(-1, num_heads, head_dim)[:num_tokens]


def _cut(q: Array, k: Array, v: Array, cu_lens: Array, size: int) -> _Tiles:
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    count = -(-num_tokens // size)
    tokens = jnp.arange(count * size)
    rows = jnp.searchsorted(cu_lens[1:], tokens, side="right").astype(jnp.int32)
    is_real = tokens < cu_lens[-1]

    def cut(x: Array, groups: tuple[int, ...]) -> Array:
        x = jnp.pad(x, ((0, count * size - num_tokens), (0, 0), (0, 0)))
        # What padding holds must not reach a product, not even with weight zero: it may be NaN.
        x = jnp.where(is_real[:, None, None], x, jnp.zeros((), x.dtype))
        return jnp.moveaxis(x.reshape(count, size, *groups, head_dim), 1, -2)

    starts = jnp.where(is_real, cu_lens[jnp.minimum(rows, cu_lens.shape[0] - 1)], cu_lens[-1])
    ends = jnp.where(is_real, cu_lens[jnp.minimum(rows + 1, cu_lens.shape[0] - 1)], 0)
    return _Tiles(
        cut(q, (num_kv_heads, num_heads // num_kv_heads)), cut(k, (num_kv_heads,)), cut(v, (num_kv_heads,)),
        starts.reshape(count, size), ends.reshape(count, size),
    )  # fmt: skip


def _start(sinks: Any, num_kv_heads: int, num_groups: int, size: int, head_dim: int) -> _Softmax:
    """The state before any key: nothing, or a logit of each head's own that no value belongs to."""
    shape = (num_kv_heads, num_groups * size)
    if sinks is None:
        peak, total = jnp.full(shape, -1e30, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, num_groups, 1)
        peak = jnp.broadcast_to(sinks, (num_kv_heads, num_groups, size)).reshape(shape)
        total = jnp.ones(shape, jnp.float32)
    return _Softmax(peak, total, jnp.zeros((*shape, head_dim), jnp.float32))


def _take_in(
    state: _Softmax, logits: Float[Array, "K Q S"], visible: Bool[Array, "1 Q S"], values: Float[Array, "K S H"]
) -> _Softmax:
    """The state with one block of keys more."""
    peak = jnp.maximum(state.peak, jnp.max(logits, axis=2, where=visible, initial=-1e30))
    weights = jnp.where(visible, jnp.exp(logits - peak[..., None]), 0.0)
    fade = jnp.exp(state.peak - peak)
    added = jnp.einsum("kqs,ksh->kqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return _Softmax(peak, state.total * fade + weights.sum(axis=2), state.out * fade[..., None] + added)
