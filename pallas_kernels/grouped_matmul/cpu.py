"""Grouped products on XLA:CPU: a loop over the groups that have rows, so that time follows the matrices in use.

A product within a loop needs its matrix in an array of its own, so the loop copies it: slab by slab, each small enough
to be read again from the cache. docs/models.md has the measurements.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.groups import group_rows

SLAB_BYTES = 2**20
MAX_TILE = 128


def grouped_matmul(
    x: Float[Array, "T K"],
    weights: Float[Array, "G K N"],
    group_sizes: Int32[Array, " E"],
    first_group: Int32[Array, ""],
) -> Float[Array, "T N"]:
    """Float32 products; rows of no group hold whatever the last tile left there."""
    num_rows, num_groups = x.shape[0], group_sizes.shape[0]
    in_size, out_size = weights.shape[1:]
    tile = choose_tile(num_rows, num_groups)
    slab = choose_slab(in_size, out_size * weights.dtype.itemsize)
    rows = group_rows(group_sizes)
    (used,) = jnp.nonzero(group_sizes, size=num_groups, fill_value=0)
    padded = jnp.pad(x, ((0, tile), (0, 0))).astype(jnp.float32)

    def multiply_group(index: Array, out: Array) -> Array:
        group = used[index].astype(jnp.int32)

        def multiply_tile(step: Array, out: Array) -> Array:
            first_row = rows.starts[group] + step * tile

            def add_slab(step: Array, total: Array) -> Array:
                first = step * slab
                matrix = lax.dynamic_slice(weights, (first_group + group, first, 0), (1, slab, out_size))[0]
                own = lax.dynamic_slice(padded, (first_row, first), (tile, slab))
                return total + jnp.dot(own, matrix.astype(jnp.float32))

            product = lax.fori_loop(0, in_size // slab, add_slab, jnp.zeros((tile, out_size), jnp.float32))
            # What it writes behind the group's own rows, the next group overwrites.
            return lax.dynamic_update_slice_in_dim(out, product, first_row, axis=0)

        size = rows.ends[group] - rows.starts[group]
        return lax.fori_loop(0, (size + tile - 1) // tile, multiply_tile, out)

    out = jnp.zeros((num_rows + tile, out_size), jnp.float32)
    return lax.fori_loop(0, jnp.sum(group_sizes > 0), multiply_group, out)[:num_rows]


def choose_tile(num_rows: int, num_groups: int) -> int:
    """Rows of a product: twice the average group, so that most groups need one."""
    wanted = max(1, 2 * num_rows // num_groups)
    return min(MAX_TILE, 2 ** (wanted - 1).bit_length())


def choose_slab(in_size: int, row_bytes: int) -> int:
    """Rows of a matrix that are copied at a time: the largest divisor of their number that fits the cache."""
    most = max(1, SLAB_BYTES // row_bytes)
    divisors = [d for i in range(1, math.isqrt(in_size) + 1) if in_size % i == 0 for d in (i, in_size // i)]
    return max(d for d in divisors if d <= most)
