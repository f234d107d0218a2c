"""The portable form: `jax.lax.ragged_dot`, which XLA has an implementation of for every kind of device.

On XLA:CPU that one multiplies every row with every group's matrix and masks the result; take `cpu` there.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def grouped_matmul(
    x: Float[Array, "T K"],
    weights: Float[Array, "G K N"],
    group_sizes: Int32[Array, " E"],
    first_group: Int32[Array, ""],
) -> Float[Array, "T N"]:
    """Float32 products; all groups of `weights` but the E asked for are given as empty."""
    sizes = group_sizes.astype(jnp.int32)
    if weights.shape[0] != sizes.shape[0]:
        sizes = jax.lax.dynamic_update_slice(jnp.zeros(weights.shape[0], jnp.int32), sizes, (first_group,))
    return jax.lax.ragged_dot(x, weights.astype(x.dtype), sizes, preferred_element_type=jnp.float32)
