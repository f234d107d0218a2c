"""Pages in a TPU kernel: a ring of buffer slots that they are fetched into, and the zeroing of what no token owns."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class PageRing(NamedTuple):
    """Buffer slots in VMEM, each for `fetch_pages` pages of one row; one semaphore a slot counts what arrived."""

    pool_ref: Any  # [L, pages, K, page_size, C] in HBM
    slots_ref: Any  # [num_slots, fetch_pages, K, page_size, C]
    sems: Any  # [num_slots] DMA semaphores
    table_ref: Any  # [R * P] in SMEM
    table_width: int
    layer: Any
    scales_ref: Any = None  # [L, pages, rows, lanes] in HBM, where pages are quantised
    scale_slots_ref: Any = None  # [num_slots, fetch_pages, rows, lanes]

    @property
    def num_slots(self) -> int:
        """Slots of the ring."""
        return self.slots_ref.shape[0]

    @property
    def fetch_pages(self) -> int:
        """Pages that a slot holds."""
        return self.slots_ref.shape[1]

    def start(self, slot: Any, row: Any, first_page: Any, num_pages: Any) -> None:
        """Start fetching pages `[first_page, first_page + num_pages)` of the row into the slot."""
        entry = row * self.table_width + first_page

        def fetch(i: Any, _: None) -> None:
            page = self.table_ref[entry + i]
            for source, target in self._buffers():
                pltpu.make_async_copy(source.at[self.layer, page], target.at[slot, i], self.sems.at[slot]).start()

        # Fetches of a full slot come four at a time, so that the next ones' addresses are ready early.
        many = 4 if self.fetch_pages % 4 == 0 else 1
        is_full = num_pages == self.fetch_pages

        def fetch_many(i: Any, _: None) -> None:
            for j in range(many):
                fetch(many * i + j, None)

        @pl.when(is_full)
        def _full() -> None:
            lax.fori_loop(0, self.fetch_pages // many, fetch_many, None)

        @pl.when(~is_full)
        def _part() -> None:
            lax.fori_loop(0, num_pages, fetch, None)

    def wait(self, slot: Any, num_pages: Any) -> None:
        """Wait until the `num_pages` pages that were started last into the slot have arrived."""

        @pl.when(num_pages == self.fetch_pages)
        def _full() -> None:
            for _, target in self._buffers():
                whole = target.at[slot]  # a wait only counts bytes, so one for the whole slot will do
                pltpu.make_async_copy(whole, whole, self.sems.at[slot]).wait()

        @pl.when(num_pages < self.fetch_pages)
        def _part() -> None:
            def arrived(i: Any, _: None) -> None:
                for _, target in self._buffers():
                    page = target.at[slot, i]
                    pltpu.make_async_copy(page, page, self.sems.at[slot]).wait()

            lax.fori_loop(0, num_pages, arrived, None)

    def _buffers(self) -> list[tuple[Any, Any]]:
        """Where pages come from, and the slots that they go to."""
        buffers = [(self.pool_ref, self.slots_ref)]
        return buffers if self.scales_ref is None else [*buffers, (self.scales_ref, self.scale_slots_ref)]


def clear_rows(slots_ref: Any, slot: Any, start: Any, stop: Any, tile: int, first_lane: int) -> None:
    """Zero rows [start, stop) of a slot from `first_lane` on; `stop` is a multiple of `tile`.

    Whatever lies there, NaN perhaps, meets a probability of exactly 0 in the matmul with the values, and must not
    turn it into NaN. An int8 cannot.
    """
    if slots_ref.dtype == jnp.int8:
        return
    _, _, num_kv_heads, page_size, lanes = slots_ref.shape
    shape = (num_kv_heads, tile, lanes - first_lane)

    def place(group: Any) -> Any:
        row = group * tile
        rows = pl.ds(pl.multiple_of(row % page_size, tile), tile)
        return slots_ref.at[slot, row // page_size, :, rows, pl.ds(first_lane, lanes - first_lane)]

    keep = start % tile

    @pl.when(keep != 0)
    def _partial() -> None:
        ref = place(start // tile)
        inside = lax.broadcasted_iota(jnp.int32, shape, 1) < keep
        ref[...] = jnp.where(inside, ref[...].astype(jnp.float32), 0.0).astype(slots_ref.dtype)

    def clear(group: Any, _: None) -> None:
        place(group)[...] = jnp.zeros(shape, slots_ref.dtype)

    lax.fori_loop((start + tile - 1) // tile, stop // tile, clear, None)
