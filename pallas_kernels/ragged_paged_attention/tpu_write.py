"""Writing the new keys and values of rows with several query tokens: a double-buffered walk over page chunks."""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.ragged_paged_attention.tpu_tuning import Shape


def pad_new(new: Float[Array, "T K C"], write_tokens: int) -> Float[Array, "K padded C"]:
    """New keys and values by head, with room for chunks that begin before the first token or end after the last."""
    tail = write_tokens + 8 + -new.shape[0] % 8
    return jnp.pad(jnp.moveaxis(new, 0, 1), ((0, 0), (write_tokens, tail), (0, 0)))


def scratch_shapes(shape: Shape, write_tokens: int) -> list[Any]:
    """What `TokenWriter` needs: new tokens, page rows to merge them into, and their semaphores, all double."""
    heads, lanes = shape.num_kv_heads, shape.layout.lanes
    return [
        pltpu.VMEM((2, heads, write_tokens + 8, lanes), jnp.float32),
        pltpu.VMEM((2, heads, write_tokens, lanes), shape.pool_dtype),
        pltpu.SemaphoreType.DMA((3, 2)),
    ]


class Chunk(NamedTuple):
    """Aligned page rows that take new tokens of one row."""

    row: Any
    index: Any
    """Which chunk of the row's sequence."""


class Writer(Protocol):
    """One kind of content on its way into chunks of pages, through a pair of buffers."""

    def start(self, chunk: Chunk, slot: Any) -> None:
        """Start fetching what the chunk is made from into buffer `slot`."""

    def finish(self, chunk: Chunk, slot: Any) -> None:
        """Wait for that, make the chunk of it, and start its way home."""

    def wait(self, slot: Any) -> None:
        """Wait until buffer `slot` has got home."""


class Walk(NamedTuple):
    """One core's share of the chunks of the rows from `first_row` on that have new tokens."""

    first_row: Any
    core: Any
    num_cores: int
    cu_q_lens_ref: Any  # [R + 1]
    kv_lens_ref: Any  # [R]
    table_ref: Any  # [R * P]
    table_width: int
    size: int
    """Tokens of a chunk: a divisor of the page size."""

    def run(self, writer: Writer) -> None:
        """Write every chunk; all have landed on return."""
        num_rows = self.kv_lens_ref.shape[0]
        first = self._settle(self._next_row(self.first_row - 1))
        pl.when(first.row < num_rows)(lambda: writer.start(first, 0))

        def write(carry: tuple[Chunk, Any]) -> tuple[Chunk, Any]:
            chunk, count = carry
            slot = lax.rem(count, 2)
            following = self._settle(Chunk(chunk.row, chunk.index + self.num_cores))
            # The other slot's write must have left before it is filled again.
            pl.when(count >= 1)(lambda: writer.wait(1 - slot))
            pl.when(following.row < num_rows)(lambda: writer.start(following, 1 - slot))
            writer.finish(chunk, slot)
            return following, count + 1

        _, count = lax.while_loop(lambda carry: carry[0].row < num_rows, write, (first, jnp.int32(0)))
        pl.when(count >= 1)(lambda: writer.wait(lax.rem(count - 1, 2)))

    def token(self, chunk: Chunk) -> Any:
        """The query token that lands on the chunk's first row; one before the row's first where that stays."""
        return chunk.index * self.size + self.cu_q_lens_ref[chunk.row] - self._start_position(chunk.row)

    def num_old(self, chunk: Chunk) -> Any:
        """How many of the chunk's tokens stay as they are."""
        return jnp.maximum(self._start_position(chunk.row) - chunk.index * self.size, 0)

    def num_tokens(self, chunk: Chunk) -> Any:
        """How many tokens the chunk then has, `size` or more if it is full."""
        return self.kv_lens_ref[chunk.row] - chunk.index * self.size

    def place(self, chunk: Chunk, page_size: int) -> tuple[Any, Any]:
        """The chunk's page and its first row there."""
        position = chunk.index * self.size
        page = self.table_ref[chunk.row * self.table_width + position // page_size]
        return page, lax.rem(position, page_size)

    def _start_position(self, row: Any) -> Any:
        return self.kv_lens_ref[row] - (self.cu_q_lens_ref[row + 1] - self.cu_q_lens_ref[row])

    def _next_row(self, row: Any) -> Chunk:
        """The first chunk of the row after this one that has new tokens, if the row has any."""
        following = jnp.minimum(row + 1, self.kv_lens_ref.shape[0] - 1)
        return Chunk(row + 1, self._start_position(following) // self.size + self.core)

    def _settle(self, chunk: Chunk) -> Chunk:
        """The first chunk at or after this one that has new tokens; its row is R when there is none."""
        last_row = self.kv_lens_ref.shape[0] - 1

        def is_past(chunk: Chunk) -> Any:
            row = jnp.clip(chunk.row, 0, last_row)
            return (chunk.row <= last_row) & (chunk.index * self.size >= self.kv_lens_ref[row])

        return lax.while_loop(is_past, lambda chunk: self._next_row(chunk.row), chunk)


class TokenWriter(NamedTuple):
    """Writes keys and values.

    New tokens start at any sublane of their array and land on aligned page rows: 8 rows too many are read and
    turned into place, which 32-bit values allow. Page rows before a request's first new token are kept.
    """

    walk: Walk
    new_ref: Any  # [K, padded, C] in HBM
    pool_ref: Any  # [L, pages, K, page_size, C] in HBM
    layer: Any
    new_vmem: Any  # [2, K, chunk + 8, C]
    rows_vmem: Any  # [2, K, chunk, C]
    sems: Any  # [3, 2]

    def start(self, chunk: Chunk, slot: Any) -> None:
        """Start fetching the chunk's new tokens and, if some stay, its old rows."""
        size = self.walk.size
        aligned = pl.multiple_of(self._token(chunk) // 8 * 8, 8)
        new = self.new_ref.at[:, pl.ds(aligned, size + 8), :]
        pltpu.make_async_copy(new, self.new_vmem.at[slot], self.sems.at[0, slot]).start()

        @pl.when(self.walk.num_old(chunk) > 0)
        def _() -> None:
            pltpu.make_async_copy(self._page_rows(chunk), self.rows_vmem.at[slot], self.sems.at[1, slot]).start()

    def finish(self, chunk: Chunk, slot: Any) -> None:
        """Put the new tokens behind the rows that stay, and start their way home."""
        new_vmem, rows_vmem, size = self.new_vmem, self.rows_vmem, self.walk.size
        num_old = self.walk.num_old(chunk)
        pltpu.make_async_copy(new_vmem.at[slot], new_vmem.at[slot], self.sems.at[0, slot]).wait()
        pl.when(num_old > 0)(lambda: self._wait(1, slot))
        turn = size + 8 - lax.rem(self._token(chunk), 8)
        row = lax.broadcasted_iota(jnp.int32, rows_vmem.shape[2:], 0)
        is_old, is_new = row < num_old, row < self.walk.num_tokens(chunk)

        def merge(head: Any, _: None) -> None:
            new = jnp.where(is_new, pltpu.roll(new_vmem[slot, head], turn, axis=0)[:size], 0.0)
            old = rows_vmem[slot, head].astype(jnp.float32)
            rows_vmem[slot, head] = jnp.where(is_old, old, new).astype(rows_vmem.dtype)

        lax.fori_loop(0, rows_vmem.shape[1], merge, None)
        pltpu.make_async_copy(rows_vmem.at[slot], self._page_rows(chunk), self.sems.at[2, slot]).start()

    def wait(self, slot: Any) -> None:
        """Wait until the slot's rows have landed."""
        self._wait(2, slot)

    def _token(self, chunk: Chunk) -> Any:
        """The place in the padded array of new tokens of what lands on the chunk's first row."""
        return self.walk.token(chunk) + self.walk.size

    def _page_rows(self, chunk: Chunk) -> Any:
        page, row = self.walk.place(chunk, self.pool_ref.shape[3])
        rows = pl.ds(pl.multiple_of(row, self.walk.size), self.walk.size)
        return self.pool_ref.at[self.layer, page, :, rows, :]

    def _wait(self, kind: int, slot: Any) -> None:
        rows = self.rows_vmem.at[slot]
        pltpu.make_async_copy(rows, rows, self.sems.at[kind, slot]).wait()
