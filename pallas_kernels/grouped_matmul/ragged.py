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
    """Float32 products. The E matrices are cut out first: XLA takes time for every one that it is given."""
    own = jax.lax.dynamic_slice_in_dim(weights, first_group, group_sizes.shape[0])
    return jax.lax.ragged_dot(x, own.astype(x.dtype), group_sizes.astype(jnp.int32), preferred_element_type=jnp.float32)
