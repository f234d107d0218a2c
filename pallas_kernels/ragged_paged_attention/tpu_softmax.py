"""One round of online softmax over a block of cached tokens, for any number of query rows of one kv head."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Num

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

    def of(
        self, q: Float[Array, "M H"], keys: Num[Array, "S H"], key_scales: Float[Array, "1 S"] | None
    ) -> Float[Array, "M S"]:
        """The logits of every query with every key."""
        dots = dot(q, keys, contract=1)
        unit = self.scale * LOG2E if self.softcap is None else self.scale / self.softcap
        dots = dots * (unit if key_scales is None else key_scales * unit)
        return dots if self.softcap is None else jnp.tanh(dots) * (self.softcap * LOG2E)

    def reset(self, peak_ref: Any, total_ref: Any, acc_ref: Any, sinks_ref: Any) -> None:
        """Begin a softmax: nothing seen, or the sink alone."""
        if sinks_ref is None:
            peak_ref[...] = jnp.full(peak_ref.shape, START, jnp.float32)
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        else:
            peak_ref[...] = sinks_ref[...] * LOG2E
            lane = lax.broadcasted_iota(jnp.int32, total_ref.shape, total_ref.ndim - 1)
            total_ref[...] = jnp.where(lane == 0, 1.0, 0.0)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)


class HeadBlock(NamedTuple):
    """A block of cached tokens of one kv head; the scales of quantised ones are 0 where no token is."""

    ref: Any  # [pages, page_size, C]
    key_scales: Float[Array, "1 S"] | None = None
    value_scales: Float[Array, "1 S"] | None = None


def update(
    queries: Sequence[Float[Array, "M H"]],
    cached: Sequence[HeadBlock],
    visible: Bool[Array, "M S"] | None,
    states: Sequence[tuple[Any, Any, Any]],
    logits: Logits,
) -> None:
    """Take a block's tokens into the softmax of each head, whose peak, total and accumulator are refs in `states`.

    Heads go through each stage together: one head alone would wait for the matrix unit at every stage.
    """
    layout = logits.layout
    block = cached[0].ref.shape[0] * cached[0].ref.shape[1]
    first_lane = 0 if layout.is_packed else layout.value_start

    scores = [
        logits.of(q, head.ref[:, :, : layout.head_lanes].reshape(block, layout.head_lanes), head.key_scales)
        for q, head in zip(queries, cached, strict=True)
    ]
    weights, decays = [], []
    for head_scores, (peak_ref, total_ref, _) in zip(scores, states, strict=True):
        if visible is not None:
            head_scores = jnp.where(visible, head_scores, HIDDEN)
        old_peak = peak_ref[...]
        peak = jnp.maximum(old_peak, jnp.max(head_scores, axis=1, keepdims=True))
        weights.append(jnp.exp2(head_scores - _lanes(peak, block)))
        decays.append(jnp.exp2(old_peak - peak))
        peak_ref[...] = peak
        total_ref[...] = decays[-1] * total_ref[...] + _lane_sums(weights[-1])
    for head_weights, decay, head, (_, _, acc_ref) in zip(weights, decays, cached, states, strict=True):
        values = head.ref[:, :, first_lane:].reshape(block, layout.head_lanes)
        if head.value_scales is not None:
            head_weights = head_weights * head.value_scales
        seen = dot(head_weights.astype(queries[0].dtype), values, contract=0)
        acc_ref[...] = acc_ref[...] * _lanes(decay, layout.head_lanes) + seen


def dot(a: Float[Array, "M X"], b: Array, *, contract: int) -> Float[Array, "M Y"]:
    """`a` times `b` in a's type, contracted over b's axis `contract`, in float32; exact products of float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b.astype(a.dtype), dims, precision=precision, preferred_element_type=jnp.float32)


def result(total: Float[Array, "M lanes"], acc: Float[Array, "M H"]) -> Float[Array, "M H"]:
    """The softmax's result; 0 for a query that saw nothing."""
    total = jnp.sum(total, axis=1, keepdims=True)
    return acc / jnp.where(total == 0.0, 1.0, total)


def _lane_sums(x: Float[Array, "M S"]) -> Float[Array, "M lanes"]:
    """Sums whose lanes add up to the sums of x's rows: adding lanes up is dear, and is done once at the end."""
    size = x.shape[1]
    if size % LANES == 0:
        return sum(x[:, i : i + LANES] for i in range(LANES, size, LANES)) + x[:, :LANES]
    lane = lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1)
    return jnp.where(lane == 0, jnp.sum(x, axis=1, keepdims=True), 0.0)


def _lanes(x: Float[Array, "M lanes"], size: int) -> Float[Array, "M S"]:
    """A value that is the same in all lanes, `size` lanes of it (or one, to be spread)."""
    return jnp.tile(x, (1, size // LANES)) if size % LANES == 0 else x[:, :1]
