"""Writing the new keys and values of rows with several query tokens: the list of what goes where, and its loop."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.tpu_tuning import Shape

FIELDS = 5
PAGE, PAGE_ROW, TOKEN, FIRST, LAST = range(FIELDS)


def list_size(shape: Shape, write_tokens: int) -> int:
    """Entries that a write list needs at most: a row of q tokens touches at most q // write_tokens + 2 chunks."""
    return shape.num_tokens // write_tokens + 2 * min(shape.num_rows, max(1, shape.num_tokens // 2))


def write_list(metadata: AttentionMetadata, shape: Shape, write_tokens: int) -> tuple[Int32[Array, " W"], Array]:
    """The chunks of `write_tokens` page rows that rows behind the decode rows write, flat, and their number.

    Entry fields: page, row in the page, token that lands on the chunk's first row (it may belong to another
    request or to nobody), and the range of chunk rows that are this request's new tokens.
    """
    cu_q_lens, kv_lens, page_table, num_decode = metadata
    num_rows = kv_lens.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    is_mixed = (jnp.arange(num_rows) >= num_decode) & (q_lens > 0)
    start = kv_lens - q_lens
    counts = jnp.where(is_mixed, (kv_lens - 1) // write_tokens - start // write_tokens + 1, 0)
    ends = jnp.cumsum(counts)
    entries = jnp.arange(list_size(shape, write_tokens), dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends[None, :] <= entries[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    position = (start[row] // write_tokens + entries - (ends - counts)[row]) * write_tokens
    column = jnp.clip(position // shape.page_size, 0, shape.table_width - 1)
    fields = [
        page_table[row, column],
        position % shape.page_size,
        cu_q_lens[row] + position - start[row],
        jnp.maximum(start[row] - position, 0),
        jnp.minimum(kv_lens[row] - position, write_tokens),
    ]
    return jnp.stack(fields, axis=1).reshape(-1).astype(jnp.int32), ends[-1].astype(jnp.int32)


def pad_new(new: Float[Array, "T K C"], write_tokens: int) -> Float[Array, "K padded C"]:
    """New keys and values by head, with room for chunks that begin before the first token or end after the last."""
    tail = write_tokens + 8 + -new.shape[0] % 8
    return jnp.pad(jnp.moveaxis(new, 0, 1), ((0, 0), (write_tokens, tail), (0, 0)))


def scratch_shapes(shape: Shape, write_tokens: int) -> list[Any]:
    """What `run_writes` needs: new tokens, page rows to merge them into, and their semaphores, all double."""
    heads, lanes = shape.num_kv_heads, shape.layout.lanes
    return [
        pltpu.VMEM((2, heads, write_tokens + 8, lanes), jnp.float32),
        pltpu.VMEM((2, heads, write_tokens, lanes), shape.pool_dtype),
        pltpu.SemaphoreType.DMA((3, 2)),
    ]


def run_writes(
    first: Any, step: int, count: Any, list_ref: Any, new_ref: Any, pool_ref: Any, layer: Any, scratch: Any
) -> None:
    """Write entries `first, first + step, ...` below `count`; every write has landed on return.

    New tokens start at any sublane of their array and land on aligned page rows: a copy of 8 rows too many is
    turned into place, which 32-bit values allow. Page rows before a request's first new token are kept.
    """
    new_vmem, rows_vmem, sems = scratch
    chunk = rows_vmem.shape[2]
    num_entries = jnp.maximum(0, (count - first + step - 1) // step)

    def field(i: Any, name: int) -> Any:
        return list_ref[(first + i * step) * FIELDS + name]

    def page_rows(i: Any) -> Any:
        rows = pl.ds(pl.multiple_of(field(i, PAGE_ROW), chunk), chunk)
        return pool_ref.at[layer, field(i, PAGE), :, rows, :]

    def fetch_new(i: Any) -> Any:
        slot = lax.rem(i, 2)
        aligned = pl.multiple_of((field(i, TOKEN) + chunk) // 8 * 8, 8)
        source = new_ref.at[:, pl.ds(aligned, chunk + 8), :]
        return pltpu.make_async_copy(source, new_vmem.at[slot], sems.at[0, slot])

    def fetch_old(i: Any) -> Any:
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(page_rows(i), rows_vmem.at[slot], sems.at[1, slot])

    def store(i: Any) -> Any:
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(rows_vmem.at[slot], page_rows(i), sems.at[2, slot])

    def start(i: Any) -> None:
        fetch_new(i).start()
        pl.when(field(i, FIRST) > 0)(lambda: fetch_old(i).start())

    def write(i: Any, _: None) -> None:
        slot = lax.rem(i, 2)

        @pl.when(i >= 1)
        def _() -> None:  # the other slot's write has left before it is filled again
            store(i - 1).wait()

        @pl.when(i + 1 < num_entries)
        def _() -> None:
            start(i + 1)

        fetch_new(i).wait()
        pl.when(field(i, FIRST) > 0)(lambda: fetch_old(i).wait())
        turn = chunk + 8 - lax.rem(field(i, TOKEN) + chunk, 8)
        row = lax.broadcasted_iota(jnp.int32, rows_vmem.shape[2:], 0)
        is_old, is_new = row < field(i, FIRST), row < field(i, LAST)
        for head in range(rows_vmem.shape[1]):
            new = jnp.where(is_new, pltpu.roll(new_vmem[slot, head], turn, axis=0)[:chunk], 0.0)
            old = rows_vmem[slot, head].astype(jnp.float32)
            rows_vmem[slot, head] = jnp.where(is_old, old, new).astype(rows_vmem.dtype)
        store(i).start()

    pl.when(num_entries > 0)(lambda: start(0))
    lax.fori_loop(0, num_entries, write, None)
    pl.when(num_entries > 0)(lambda: store(num_entries - 1).wait())
