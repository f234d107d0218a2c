"""Log-probabilities of chosen and most likely tokens, from raw logits, on the device."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

TILE = 64
"""Rows whose logits are alive at once in `prompt_logprobs`."""


class Logprobs(NamedTuple):
    """What is reported about one token in each of R rows."""

    chosen: Float32[Array, " R"]
    """Log-probability of the chosen token."""
    rank: Int32[Array, " R"]
    """1 + the number of tokens more likely than the chosen one."""
    top_ids: Int32[Array, "R K"]
    """The most likely tokens, best first, the lower id first among equals (-0.0 counts as less than 0.0)."""
    top: Float32[Array, "R K"]
    """Their log-probabilities."""


def gather_logprobs(logits: Float[Array, "R V"], token_ids: Int32[Array, " R"], num_top: int) -> Logprobs:
    """Log-probability and rank of `token_ids`, and the `num_top` most likely tokens (0 to V of them).

    Ranks compare logits, not log-probabilities: rounding makes ties of the latter that the sampler did not see.
    """
    logits = logits.astype(jnp.float32)
    top = logits.max(axis=-1, keepdims=True)
    # [R, 1]; subtracted last and alone, so that the log-probability keeps the precision of the difference
    log_total = jnp.log(jnp.exp(logits - top).sum(axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1, mode="clip")
    rank = 1 + (logits > chosen).astype(jnp.float32).sum(axis=-1).astype(jnp.int32)
    # The barriers keep XLA:CPU from merging a later slice into top_k, which turns it into a sort, 70 times as slow. One
    # around the pair would stop XLA:CPU's compiler when it compiles for several devices.
    values, ids = map(lax.optimization_barrier, lax.top_k(logits, num_top))
    return Logprobs(((chosen - top) - log_total)[:, 0], rank, ids, (values - top) - log_total)


def prompt_logprobs(
    hidden: Float[Array, "T D"],
    logits_fn: Callable[[Float[Array, "R D"]], Float[Array, "R V"]],
    target_ids: Int32[Array, " T"],
    num_top: int,
) -> Logprobs:
    """`gather_logprobs` of `logits_fn(hidden)`, computed `TILE` rows at a time: T x V logits would not fit."""
    num_tokens = hidden.shape[0]
    tile = min(TILE, num_tokens)
    padding = -num_tokens % tile
    tiles = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, tile, hidden.shape[1]),
        jnp.pad(target_ids, (0, padding)).reshape(-1, tile),
    )
    result = lax.map(lambda rows: gather_logprobs(logits_fn(rows[0]), rows[1], num_top), tiles)
    return Logprobs(*(x.reshape(num_tokens + padding, *x.shape[2:])[:num_tokens] for x in result))
