"""One round of online softmax over a block of cached tokens, for any number of query rows of one kv head."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.ragged_paged_attention.tpu_tuning import LANES, PageLayout

LOG2E = math.log2(math.e)
START = -1e30
"""Peak of a query that has seen nothing yet."""
HIDDEN = -2e30
"""Logit of what a query must not see: below START, so its exponential is 0 even before anything was seen."""


class Logits(NamedTuple):
    """How queries and keys become logits; logits are in units of log2(e), because the chip has powers of 2."""

    scale: float
    softcap: float | None
    layout: PageLayout
    block_pages: int

    def of(self, q: Float[Array, "M H"], keys: Float[Array, "S H"]) -> Float[Array, "M S"]:
        """The logits of every query with every key."""
        precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
        dots = lax.dot_general(
            q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        if self.softcap is None:
            return dots * (self.scale * LOG2E)
        return jnp.tanh(dots * (self.scale / self.softcap)) * (self.softcap * LOG2E)

    def reset(self, peak_ref: Any, total_ref: Any, acc_ref: Any, sinks_ref: Any) -> None:
        """Begin a softmax: nothing seen, or the sink alone."""
        if sinks_ref is None:
            peak_ref[...] = jnp.full(peak_ref.shape, START, jnp.float32)
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        else:
            peak_ref[...] = sinks_ref[...] * LOG2E
            total_ref[...] = jnp.ones(total_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)


def update(
    q: Float[Array, "M H"],
    cached_ref: Any,
    visible: Bool[Array, "M S"] | None,
    state: tuple[Any, Any, Any],
    logits: Logits,
) -> None:
    """Take the block's tokens into a softmax whose peak, total and accumulator are in `state`'s refs."""
    peak_ref, total_ref, acc_ref = state
    layout = logits.layout
    block = cached_ref.shape[0] * cached_ref.shape[1]
    scores = logits.of(q, cached_ref[:, :, : layout.head_lanes].reshape(block, layout.head_lanes))
    if visible is not None:
        scores = jnp.where(visible, scores, HIDDEN)
    old_peak = peak_ref[...]
    peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - peak[:, :1])
    decay = jnp.exp2(old_peak - peak)
    peak_ref[...] = peak
    total_ref[...] = decay * total_ref[...] + jnp.sum(weights, axis=1, keepdims=True)
    first_lane = 0 if layout.is_packed else layout.value_start
    values = cached_ref[:, :, first_lane:].reshape(block, layout.head_lanes)
    precision = lax.Precision.HIGHEST if values.dtype == jnp.float32 else None
    seen = lax.dot_general(
        weights.astype(values.dtype), values, (((1,), (0,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    acc_ref[...] = acc_ref[...] * wide(decay, layout) + seen


def wide(x: Float[Array, "M lanes"], layout: PageLayout) -> Float[Array, "M H"]:
    """A value that is the same in all lanes, as wide as a result."""
    return x if layout.head_lanes == LANES else jnp.tile(x, (1, layout.head_lanes // LANES))
