"""Writing the new keys and values of rows with several query tokens: a double-buffered walk over page chunks."""

from typing import Any, NamedTuple

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
    """What `Writer` needs: new tokens, page rows to merge them into, and their semaphores, all double."""
    heads, lanes = shape.num_kv_heads, shape.layout.lanes
    return [
        pltpu.VMEM((2, heads, write_tokens + 8, lanes), jnp.float32),
        pltpu.VMEM((2, heads, write_tokens, lanes), shape.pool_dtype),
        pltpu.SemaphoreType.DMA((3, 2)),
    ]


class _Chunk(NamedTuple):
    """Aligned page rows that take new tokens of one row."""

    row: Any
    index: Any
    """Which chunk of the row's sequence."""


class Writer(NamedTuple):
    """Writes one core's share of the new tokens of the rows from `first_row` on.

    New tokens start at any sublane of their array and land on aligned page rows: 8 rows too many are read and
    turned into place, which 32-bit values allow. Page rows before a request's first new token are kept.
    """

    first_row: Any
    core: Any
    num_cores: int
    cu_q_lens_ref: Any  # [R + 1]
    kv_lens_ref: Any  # [R]
    table_ref: Any  # [R * P]
    table_width: int
    new_ref: Any  # [K, padded, C] in HBM
    pool_ref: Any  # [L, pages, K, page_size, C] in HBM
    layer: Any
    new_vmem: Any  # [2, K, chunk + 8, C]
    rows_vmem: Any  # [2, K, chunk, C]
    sems: Any  # [3, 2]

    def run(self) -> None:
        """Write every new token of this core's share; all writes have landed on return."""
        num_rows, store = self.kv_lens_ref.shape[0], 2
        first = self._settle(self.first_row - 1, jnp.int32(1 << 24))

        @pl.when(first.row < num_rows)
        def _start() -> None:
            self._start(first, 0)

        def write(carry: tuple[_Chunk, Any]) -> tuple[_Chunk, Any]:
            chunk, count = carry
            slot = lax.rem(count, 2)
            following = self._settle(chunk.row, chunk.index + self.num_cores)

            @pl.when(count >= 1)
            def _() -> None:  # the other slot's write must have left before it is filled again
                self._wait_rows(store, 1 - slot)

            @pl.when(following.row < num_rows)
            def _() -> None:
                self._start(following, 1 - slot)

            self._merge(chunk, slot)
            pltpu.make_async_copy(self.rows_vmem.at[slot], self._page_rows(chunk), self.sems.at[store, slot]).start()
            return following, count + 1

        _, count = lax.while_loop(lambda carry: carry[0].row < num_rows, write, (first, jnp.int32(0)))
        pl.when(count >= 1)(lambda: self._wait_rows(store, lax.rem(count - 1, 2)))

    @property
    def _size(self) -> int:
        return self.rows_vmem.shape[2]

    def _start_position(self, row: Any) -> Any:
        return self.kv_lens_ref[row] - (self.cu_q_lens_ref[row + 1] - self.cu_q_lens_ref[row])

    def _settle(self, row: Any, index: Any) -> _Chunk:
        """The first chunk at or after this one that has new tokens; its row is R when there is none."""
        last_row = self.kv_lens_ref.shape[0] - 1

        def is_past(chunk: _Chunk) -> Any:
            row = jnp.clip(chunk.row, 0, last_row)
            return (chunk.row <= last_row) & (chunk.index * self._size >= self.kv_lens_ref[row])

        def step(chunk: _Chunk) -> _Chunk:
            row = jnp.minimum(chunk.row + 1, last_row)
            return _Chunk(chunk.row + 1, self._start_position(row) // self._size + self.core)

        return lax.while_loop(is_past, step, _Chunk(row, index))

    def _token(self, chunk: _Chunk) -> Any:
        """The place in the padded array of new tokens of what lands on the chunk's first row."""
        shift = self.cu_q_lens_ref[chunk.row] - self._start_position(chunk.row)
        return chunk.index * self._size + shift + self._size

    def _num_old(self, chunk: _Chunk) -> Any:
        return jnp.maximum(self._start_position(chunk.row) - chunk.index * self._size, 0)

    def _page_rows(self, chunk: _Chunk) -> Any:
        page_size, position = self.pool_ref.shape[3], chunk.index * self._size
        page = self.table_ref[chunk.row * self.table_width + position // page_size]
        rows = pl.ds(pl.multiple_of(lax.rem(position, page_size), self._size), self._size)
        return self.pool_ref.at[self.layer, page, :, rows, :]

    def _start(self, chunk: _Chunk, slot: Any) -> None:
        aligned = pl.multiple_of(self._token(chunk) // 8 * 8, 8)
        new = self.new_ref.at[:, pl.ds(aligned, self._size + 8), :]
        pltpu.make_async_copy(new, self.new_vmem.at[slot], self.sems.at[0, slot]).start()

        @pl.when(self._num_old(chunk) > 0)
        def _() -> None:
            pltpu.make_async_copy(self._page_rows(chunk), self.rows_vmem.at[slot], self.sems.at[1, slot]).start()

    def _wait_rows(self, kind: int, slot: Any) -> None:
        rows = self.rows_vmem.at[slot]
        pltpu.make_async_copy(rows, rows, self.sems.at[kind, slot]).wait()

    def _merge(self, chunk: _Chunk, slot: Any) -> None:
        """Wait for the chunk's new tokens and old rows, and put the tokens behind the rows that stay."""
        new_vmem, rows_vmem = self.new_vmem, self.rows_vmem
        num_old = self._num_old(chunk)
        pltpu.make_async_copy(new_vmem.at[slot], new_vmem.at[slot], self.sems.at[0, slot]).wait()
        pl.when(num_old > 0)(lambda: self._wait_rows(1, slot))
        turn = self._size + 8 - lax.rem(self._token(chunk), 8)
        row = lax.broadcasted_iota(jnp.int32, rows_vmem.shape[2:], 0)
        is_old, is_new = row < num_old, row < self.kv_lens_ref[chunk.row] - chunk.index * self._size

        def merge(head: Any, _: None) -> None:
            new = jnp.where(is_new, pltpu.roll(new_vmem[slot, head], turn, axis=0)[: self._size], 0.0)
            old = rows_vmem[slot, head].astype(jnp.float32)
            rows_vmem[slot, head] = jnp.where(is_old, old, new).astype(rows_vmem.dtype)

        lax.fori_loop(0, rows_vmem.shape[1], merge, None)
