"""Grouped products on TPU: one Pallas kernel over the (group, tile of rows) pairs that have rows in common.

Grid: column blocks, pairs, slices of K. The number of pairs is a bound known only at run time, so a group without rows
costs nothing, and its matrix is never read. A tile of rows that several groups share stays in VMEM while they take
turns, each writing its own rows. Memory: two blocks of each operand and one float32 accumulator.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.groups import group_rows, list_items

LANES = 128
MAX_ROWS = 128
MAX_K = 4096
BLOCK_BYTES = 3 * 2**20
"""Of a block of the matrices: two of them, with what the other operands need, fit the smallest chip's scoped VMEM."""


@dataclass(frozen=True)
class Config:
    """Block sizes: rows, slice of K, columns."""

    rows: int
    k: int
    columns: int


def choose(num_rows: int, in_size: int, out_size: int, itemsize: int) -> Config:
    """Whole columns of K where they fit, because then nothing is accumulated; wide blocks, as they are one copy each.

    Raises `NotImplementedError` for a K that is large and has no slice of whole tiles.
    """
    rows = min(MAX_ROWS, -(-num_rows // 16) * 16)
    k = in_size
    if in_size > MAX_K:
        fitting = [size for size in range(LANES, MAX_K + 1, LANES) if in_size % size == 0]
        if not fitting:
            raise NotImplementedError(f"The tpu backend needs K up to {MAX_K} or a multiple of {LANES}, got {in_size}.")
        k = fitting[-1]
    columns = max(LANES, BLOCK_BYTES // (k * itemsize) // LANES * LANES)
    return Config(rows, k, min(columns, -(-out_size // LANES) * LANES))


def _kernel(
    # prefetched scalars
    groups_ref: Any,  # [items]
    tiles_ref: Any,  # [items]
    starts_ref: Any,  # [E]
    ends_ref: Any,  # [E]
    first_group_ref: Any,  # [1]
    # inputs
    x_ref: Any,  # [rows, k]
    weights_ref: Any,  # [k, columns]
    # output
    out_ref: Any,  # [rows, columns]
    # scratch memory
    total_ref: Any,  # [rows, columns] float32
    *,
    num_slices: int,
) -> None:
    item, step = pl.program_id(1), pl.program_id(2)
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    @pl.when(step == 0)
    def _start() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)

    total_ref[...] += jnp.dot(x_ref[...], weights_ref[...], preferred_element_type=jnp.float32, precision=precision)

    @pl.when(step == num_slices - 1)
    def _finish() -> None:
        group, tile = groups_ref[item], tiles_ref[item]
        rows = tile * out_ref.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
        is_own = (rows >= starts_ref[group]) & (rows < ends_ref[group])
        is_new = (item == 0) | (tiles_ref[jnp.maximum(item, 1) - 1] != tile)
        # A tile that nobody has written holds anything, NaN included.
        others = jnp.where(is_new, 0.0, out_ref[...].astype(jnp.float32))
        out_ref[...] = jnp.where(is_own, total_ref[...], others).astype(out_ref.dtype)


def grouped_matmul(
    x: Float[Array, "T K"],
    weights: Float[Array, "G K N"],
    group_sizes: Int32[Array, " E"],
    first_group: Int32[Array, ""],
    *,
    interpret: Any = False,
    config: Config | None = None,
) -> Float[Array, "T N"]:
    """Products in the type of `x`, summed in float32; rows of no group are unspecified."""
    (num_rows, in_size), out_size = x.shape, weights.shape[2]
    if x.dtype != weights.dtype:
        raise NotImplementedError(f"The tpu backend needs x and weights of one type, got {x.dtype}, {weights.dtype}.")
    config = config or choose(num_rows, in_size, out_size, weights.dtype.itemsize)
    padded = jnp.pad(x, ((0, -num_rows % config.rows), (0, 0)))
    rows = group_rows(group_sizes)
    items = list_items(rows, padded.shape[0] // config.rows, config.rows)
    num_slices = in_size // config.k

    def x_block(column: Any, item: Any, step: Any, groups: Any, tiles: Any, *_: Any) -> tuple[Any, ...]:
        return tiles[item], step

    def weights_block(column: Any, item: Any, step: Any, groups: Any, *scalars: Any) -> tuple[Any, ...]:
        return scalars[-1][0] + groups[item], step, column

    def out_block(column: Any, item: Any, step: Any, groups: Any, tiles: Any, *_: Any) -> tuple[Any, ...]:
        return tiles[item], column

    out = pl.pallas_call(
        partial(_kernel, num_slices=num_slices),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(-(-out_size // config.columns), jnp.maximum(items.num_needed, 1), num_slices),
            in_specs=[
                pl.BlockSpec((config.rows, config.k), x_block),
                pl.BlockSpec((None, config.k, config.columns), weights_block),
            ],
            out_specs=pl.BlockSpec((config.rows, config.columns), out_block),
            scratch_shapes=[pltpu.VMEM((config.rows, config.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], out_size), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="grouped_matmul",
    )(items.groups, items.tiles, rows.starts, rows.ends, first_group.reshape(1), padded, weights)
    return out[:num_rows]
