"""The decode kernel: rows of one query token, their key and value written on the way, and longer rows' writes.

Grid (cores, blocks of rows); the blocks' queries and results are pipelined by Pallas, pages by the kernel: a ring
of slots runs ahead over blocks and rows alike, so that the memory never waits for a row to end. A row's last tile
is in VMEM anyway to be read; there the new token joins it and goes home.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention.tpu_pages import PageRing, clear_rows
from pallas_kernels.ragged_paged_attention.tpu_softmax import Logits, result, update
from pallas_kernels.ragged_paged_attention.tpu_tuning import LANES, Config, Shape
from pallas_kernels.ragged_paged_attention.tpu_write import Writer, scratch_shapes

FETCH_ROW, FETCH_BLOCK, ISSUED, CONSUMED, WRITTEN = range(5)
MOST_TOGETHER = 8
"""Heads that go through a block together; a power of 2."""
PREFETCH = ("layer", "window", "num_decode_rows", "cu_q_lens", "kv_lens", "table")


class Scratch(NamedTuple):
    """The kernel's own memory."""

    slots: Any
    tiles: Any  # [2, K, tile, C] tiles with a new token, on their way home
    peak: Any  # [K, G, 128]
    total: Any  # [K, G, 128]
    acc: Any  # [K, G, H]
    cursor: Any  # SMEM
    fetched: Any
    written: Any
    new: Any
    rows: Any
    copied: Any


def decode(
    q: Float[Array, "T K G H"],
    new: Float[Array, "T K C"],
    all_new: Float[Array, "K padded C"],
    pool: Float[Array, "L pages K page_size C"],
    sinks: Float[Array, "K G lanes"] | None,
    scalars: dict[str, Int32[Array, "..."]],
    shape: Shape,
    config: Config,
    logits: Logits,
    num_cores: int,
    interpret: Any,
) -> tuple[Float[Array, "T K G H"], Float[Array, "L pages K page_size C"]]:
    """Results of the decode rows' tokens (of others', anything at all), and the pool with every new token written."""
    rows = config.decode_rows
    steps = -(-min(shape.num_rows, shape.num_tokens) // (rows * num_cores))

    def block(x: jax.Array) -> pl.BlockSpec:
        zeros = (0,) * (x.ndim - 1)
        return pl.BlockSpec((rows, *x.shape[1:]), lambda core, step, *_: (step * num_cores + core, *zeros))

    hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    operands, specs = [q, new, all_new], [block(q), block(new), hbm]
    if sinks is not None:
        operands.append(sinks)
        specs.append(pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0)))
    prefetch = [scalars[name] for name in PREFETCH]
    return pl.pallas_call(
        lambda *refs: _kernel(refs, sinks is not None, shape, config, logits, num_cores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(num_cores, steps),
            in_specs=[*specs, hbm],
            out_specs=[block(q), hbm],
            scratch_shapes=_scratch_shapes(shape, config),
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        input_output_aliases={len(prefetch) + len(operands): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # page numbers are in range by contract; a check is half of a fetch's cost
        ),
        name="ragged_paged_attention_decode",
        interpret=interpret,
    )(*prefetch, *operands, pool)


def _scratch_shapes(shape: Shape, config: Config) -> Scratch:
    heads, groups, layout = shape.num_kv_heads, shape.groups, shape.layout
    slot = (config.num_slots, config.decode_fetch_pages, heads, config.page_size, layout.lanes)
    return Scratch(
        pltpu.VMEM(slot, shape.pool_dtype),
        pltpu.VMEM((2, heads, shape.tile_rows, layout.lanes), shape.pool_dtype),
        pltpu.VMEM((heads, groups, LANES), jnp.float32),
        pltpu.VMEM((heads, groups, LANES), jnp.float32),
        pltpu.VMEM((heads, groups, layout.head_lanes), jnp.float32),
        pltpu.SMEM((8,), jnp.int32),
        pltpu.SemaphoreType.DMA((config.num_slots,)),
        pltpu.SemaphoreType.DMA((2,)),
        *scratch_shapes(shape, config.write_tokens),
    )


class _Rows(NamedTuple):
    """Where rows begin and end in their pages, and in which order one core takes them."""

    kv_lens: Any
    window: Any
    num_decode: Any
    page_size: int
    block_rows: int
    num_cores: int

    def first_position(self, row: Any) -> Any:
        """The first position that the row's query sees."""
        seen = self.kv_lens[row]
        return jnp.where(self.window > 0, jnp.maximum(seen - self.window, 0), 0)

    def pages(self, row: Any) -> tuple[Any, Any]:
        """The range of the row's pages that its query sees."""
        page_size = self.page_size
        return self.first_position(row) // page_size, (self.kv_lens[row] + page_size - 1) // page_size

    def after(self, row: Any) -> Any:
        """The row that this core takes next."""
        jump = (self.num_cores - 1) * self.block_rows
        return row + 1 + jnp.where(lax.rem(row + 1, self.block_rows) == 0, jump, 0)


def _kernel(refs: Any, has_sinks: bool, shape: Shape, config: Config, logits: Logits, num_cores: int) -> None:
    layer_ref, window_ref, num_decode_ref, cu_q_lens_ref, kv_lens_ref, table_ref, q_ref, new_ref, all_new_ref = refs[:9]
    sinks_ref = refs[9] if has_sinks else None
    _, out_ref, pool_ref, *scratch = refs[9 + has_sinks :]
    scratch = Scratch(*scratch)
    core, step, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    ring = PageRing(pool_ref, scratch.slots, scratch.fetched, table_ref, shape.table_width, layer)
    rows = _Rows(kv_lens_ref, window_ref[0], num_decode_ref[0], config.page_size, config.decode_rows, num_cores)
    cursor = scratch.cursor

    def fetch_next() -> None:
        row = cursor[FETCH_ROW]

        @pl.when(row < rows.num_decode)
        def _() -> None:
            first, end = rows.pages(row)
            first += cursor[FETCH_BLOCK] * ring.fetch_pages
            num_pages = jnp.minimum(end - first, ring.fetch_pages)
            ring.start(lax.rem(cursor[ISSUED], ring.num_slots), row, first, num_pages)
            is_last = first + num_pages == end
            cursor[FETCH_ROW] = jnp.where(is_last, rows.after(row), row)
            cursor[FETCH_BLOCK] = jnp.where(is_last, 0, cursor[FETCH_BLOCK] + 1)
            cursor[ISSUED] = cursor[ISSUED] + 1

    @pl.when(step == 0)
    def _prime() -> None:
        for i in range(5):
            cursor[i] = 0
        cursor[FETCH_ROW] = core * config.decode_rows
        Writer(
            rows.num_decode, core, num_cores, cu_q_lens_ref, kv_lens_ref, table_ref, shape.table_width,
            all_new_ref, pool_ref, layer, scratch.new, scratch.rows, scratch.copied,
        ).run()  # fmt: skip
        for _ in range(ring.num_slots - 1):
            fetch_next()

    home = _Home(scratch.tiles, scratch.written, pool_ref, layer, table_ref, shape)

    def attend(local: Any, _: None) -> None:
        row = (step * num_cores + core) * config.decode_rows + local

        @pl.when(row < rows.num_decode)
        def _() -> None:
            _attend_row(row, local, q_ref, new_ref, out_ref, sinks_ref, ring, rows, fetch_next, home, scratch, logits)

    lax.fori_loop(0, config.decode_rows, attend, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _drain() -> None:
        for back in (1, 2):
            pl.when(cursor[WRITTEN] >= back)(lambda back=back: home.wait(cursor[WRITTEN] - back))


class _Home(NamedTuple):
    """The way of a new token's tile back into its page."""

    tiles: Any
    sems: Any
    pool_ref: Any
    layer: Any
    table_ref: Any
    shape: Shape

    def wait(self, count: Any) -> None:
        """Wait for write number `count`."""
        tile = self.tiles.at[lax.rem(count, 2)]
        pltpu.make_async_copy(tile, tile, self.sems.at[lax.rem(count, 2)]).wait()

    def write(self, count: Any, row: Any, position: Any, tile: Any) -> None:
        """Start write number `count`: `tile` is the row's tile that holds `position`."""
        pl.when(count >= 2)(lambda: self.wait(count - 2))
        parity, page_size, height = lax.rem(count, 2), self.shape.page_size, self.shape.tile_rows
        self.tiles[parity] = tile
        page = self.table_ref[row * self.shape.table_width + position // page_size]
        rows = pl.ds(pl.multiple_of(lax.rem(position, page_size) // height * height, height), height)
        target = self.pool_ref.at[self.layer, page, :, rows, :]
        pltpu.make_async_copy(self.tiles.at[parity], target, self.sems.at[parity]).start()


def _attend_row(
    row: Any,
    local: Any,
    q_ref: Any,
    new_ref: Any,
    out_ref: Any,
    sinks_ref: Any,
    ring: PageRing,
    rows: _Rows,
    fetch_next: Any,
    home: _Home,
    scratch: Scratch,
    logits: Logits,
) -> None:
    shape, cursor = home.shape, scratch.cursor
    page_size, fetch_tokens = shape.page_size, ring.fetch_pages * shape.page_size
    block_pages = logits.block_pages
    block, together = block_pages * page_size, math.gcd(shape.num_kv_heads, MOST_TOGETHER)
    kv_len, (first_page, end_page) = rows.kv_lens[row], rows.pages(row)
    num_fetches = (end_page - first_page + ring.fetch_pages - 1) // ring.fetch_pages
    logits.reset(scratch.peak, scratch.total, scratch.acc, sinks_ref)

    def attend_fetch(i: Any, _: None) -> None:
        slot = lax.rem(cursor[CONSUMED], ring.num_slots)
        fetch_next()
        first = first_page + i * ring.fetch_pages
        ring.wait(slot, jnp.minimum(end_page - first, ring.fetch_pages))
        valid = jnp.minimum(kv_len - first * page_size, fetch_tokens)
        num_blocks = (valid + block - 1) // block

        @pl.when(i == num_fetches - 1)
        def _() -> None:
            count = cursor[WRITTEN]
            home.write(count, row, kv_len - 1, _join(ring, slot, valid - 1, new_ref[local].astype(jnp.float32), shape))
            cursor[WRITTEN] = count + 1
            first_lane = 0 if shape.layout.is_packed else shape.layout.value_start
            clear_rows(ring.slots_ref, slot, valid, num_blocks * block, shape.tile_rows, first_lane)

        def attend_block(j: Any, _: None) -> None:
            start = first * page_size + j * block
            position = start + lax.broadcasted_iota(jnp.int32, (shape.groups, block), 1)
            visible = (position < kv_len) & (position >= rows.first_position(row))

            def attend_heads(i: Any, _: None) -> None:
                heads = [i * together + head for head in range(together)]
                pages = pl.ds(j * block_pages, block_pages)
                cached = [ring.slots_ref.at[slot, pages, head] for head in heads]
                states = [(scratch.peak.at[head], scratch.total.at[head], scratch.acc.at[head]) for head in heads]
                update([q_ref[local, head] for head in heads], cached, visible, states, logits)

            lax.fori_loop(0, shape.num_kv_heads // together, attend_heads, None)

        lax.fori_loop(0, num_blocks, attend_block, None)
        cursor[CONSUMED] = cursor[CONSUMED] + 1

    lax.fori_loop(0, num_fetches, attend_fetch, None)
    for head in range(shape.num_kv_heads):
        out_ref[local, head] = result(scratch.total[head], scratch.acc[head]).astype(out_ref.dtype)


def _join(ring: PageRing, slot: Any, last: Any, new: Any, shape: Shape) -> Any:
    """The tile of the slot that holds row `last`, with the new token there and zeros behind; the slot has it too."""
    height, page_size = shape.tile_rows, shape.page_size
    rows = pl.ds(pl.multiple_of(lax.rem(last, page_size) // height * height, height), height)
    tile_ref = ring.slots_ref.at[slot, last // page_size, :, rows, :]
    row = lax.broadcasted_iota(jnp.int32, tile_ref.shape, 1)
    offset = lax.rem(last, height)
    old = jnp.where(row < offset, tile_ref[...].astype(jnp.float32), 0.0)
    tile = jnp.where(row == offset, new[:, None, :], old).astype(ring.slots_ref.dtype)
    tile_ref[...] = tile
    return tile
