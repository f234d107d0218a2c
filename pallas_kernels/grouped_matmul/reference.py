"""The oracle: each row times its group's matrix, one row at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def grouped_matmul(
    x: Float[Array, "T K"],
    weights: Float[Array, "G K N"],
    group_sizes: Int32[Array, " E"],
    first_group: Int32[Array, ""],
) -> Float[Array, "T N"]:
    """Float32 products; rows of no group take the last group's matrix."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(x.shape[0])
    groups = jnp.minimum(jnp.sum(ends[None, :] <= rows[:, None], axis=1), group_sizes.shape[0] - 1)

    def multiply(row: tuple[Array, Array]) -> Array:
        values, group = row
        matrix = weights[first_group + group].astype(jnp.float32)
        return jnp.dot(values.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.map(multiply, (x, groups))
