"""Quantised KV pages: 8-bit values, and one float32 scale for each token, kv head, and key or value, beside the page.

A scale of its own for every token needs no calibration, does not depend on which tokens were written together, and
makes a page complete in itself: it can be shared, copied and moved like any other.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Types of quantised pages, and the largest value of each."""

LEAST = 1e-30
"""What counts as the largest of a head of zeros: far from where float32 loses precision."""


class QuantisedPool(NamedTuple):
    """A pool of 8-bit pages and the scales of what is in them; both have layers and pages first."""

    pages: Num[Array, "L pages ..."]
    scales: Float[Array, "L pages ..."]


def is_quantised(dtype: Any) -> bool:
    """Whether pages of this dtype need scales."""
    return jnp.dtype(dtype).name in LARGEST


def quantise(x: Float[Array, "*N H"], dtype: Any) -> tuple[Num[Array, "*N H"], Float[Array, " *N"]]:
    """`x` in 8 bits, and the scales that turn it back: its largest magnitude is the dtype's largest value."""
    largest = LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), LEAST) / largest
    scaled = jnp.clip(x / scales[..., None], -largest, largest)
    return (jnp.round(scaled) if jnp.dtype(dtype) == jnp.int8 else scaled).astype(dtype), scales
