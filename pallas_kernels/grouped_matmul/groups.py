"""Which tiles of rows each group has work in."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class GroupRows(NamedTuple):
    """Where each group's rows are: `[starts, ends)`."""

    starts: Int32[Array, " E"]
    ends: Int32[Array, " E"]


def group_rows(group_sizes: Int32[Array, " E"]) -> GroupRows:
    """The rows of groups that lie one after another."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return GroupRows(ends - group_sizes.astype(jnp.int32), ends)


class Items(NamedTuple):
    """Every (group, tile) pair that has rows in common, in the order of rows; the first `num_needed` are real."""

    num_needed: Int32[Array, ""]
    groups: Int32[Array, " items"]
    tiles: Int32[Array, " items"]


def list_items(rows: GroupRows, num_tiles: int, tile: int) -> Items:
    """The pairs for tiles of `tile` rows that start at multiples of it; an empty group has none."""
    num_groups = rows.starts.shape[0]
    first = rows.starts // tile
    counts = jnp.where(rows.ends > rows.starts, (rows.ends + tile - 1) // tile - first, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    items = jnp.arange(num_tiles + num_groups - 1, dtype=jnp.int32)
    groups = jnp.minimum(jnp.sum(ends[None, :] <= items[:, None], axis=1, dtype=jnp.int32), num_groups - 1)
    tiles = first[groups] + items - (ends - counts)[groups]
    return Items(ends[-1], groups, jnp.clip(tiles, 0, num_tiles - 1))
