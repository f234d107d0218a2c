"""The decode kernel: rows of one query token, their key and value written on the way, and longer rows' writes.

Grid (cores, blocks of rows); the blocks' queries and results are pipelined by Pallas, pages by the kernel: a ring
of slots runs ahead over blocks and rows alike, so that the memory never waits for a row to end. A row's last tile
is in VMEM anyway to be read; there the new token joins it and goes home.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention import tpu_scales
from pallas_kernels.ragged_paged_attention.tpu_pages import PageRing, clear_rows
from pallas_kernels.ragged_paged_attention.tpu_softmax import HeadBlock, Logits, result, update
from pallas_kernels.ragged_paged_attention.tpu_tuning import LANES, Config, Shape
from pallas_kernels.ragged_paged_attention.tpu_write import TokenWriter, Walk, scratch_shapes

FETCH_ROW, FETCH_BLOCK, ISSUED, CONSUMED, WRITTEN = range(5)
MOST_TOGETHER = 8
"""Heads that go through a block together; a power of 2."""
PREFETCH = ("layer", "window", "num_decode_rows", "cu_q_lens", "kv_lens", "table")


class New(NamedTuple):
    """A step's keys and values by token, where decode rows find theirs, and by head, where longer rows do."""

    tokens: Any  # [T, K, C], a decode row's in each block
    heads: Any  # [K, padded, C] float32
    token_scales: Any = None  # [T, rows, 128] of quantised ones: one token's in all lanes
    head_scales: Any = None  # [rows, padded]


class ScaleScratch(NamedTuple):
    """The kernel's own memory for the scales of quantised pages."""

    slots: Any
    tiles: Any  # [2, rows, lanes] pages' scales with a new token's, on their way home
    block: Any  # [rows, S]
    new: Any
    pages: Any
    copied: Any


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
    scales: ScaleScratch | None


def decode(
    q: Float[Array, "T K G H"],
    new: New,
    pool: Sequence[jax.Array],
    sinks: Float[Array, "K G lanes"] | None,
    scalars: dict[str, Int32[Array, "..."]],
    shape: Shape,
    config: Config,
    logits: Logits,
    num_cores: int,
    interpret: Any,
) -> tuple[Float[Array, "T K G H"], Sequence[jax.Array]]:
    """Results of the decode rows' tokens (of others', anything at all), and the pool with every new token written.

    The pool is its pages and, if it is quantised, their scales.
    """
    rows = config.decode_rows
    steps = -(-min(shape.num_rows, shape.num_tokens) // (rows * num_cores))

    def block(x: jax.Array) -> pl.BlockSpec:
        zeros = (0,) * (x.ndim - 1)
        return pl.BlockSpec((rows, *x.shape[1:]), lambda core, step, *_: (step * num_cores + core, *zeros))

    hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    new_specs = New(block(new.tokens), hbm)
    if new.token_scales is not None:
        new_specs = new_specs._replace(token_scales=block(new.token_scales), head_scales=hbm)
    sinks_spec = None if sinks is None else pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0))
    operands, specs = (q, new, sinks), (block(q), new_specs, sinks_spec)
    prefetch = [scalars[name] for name in PREFETCH]
    first_pool = len(prefetch) + len(jax.tree.leaves(operands))
    out, *pool = pl.pallas_call(
        lambda *refs: _kernel(
            refs[: len(prefetch)],
            *refs[len(prefetch) :],
            shape=shape,
            config=config,
            logits=logits,
            num_cores=num_cores,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(num_cores, steps),
            in_specs=[*specs, [hbm] * len(pool)],
            out_specs=[block(q), *[hbm] * len(pool)],
            scratch_shapes=_scratch_shapes(shape, config),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pool)],
        input_output_aliases={first_pool + i: 1 + i for i in range(len(pool))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # page numbers are in range by contract; a check is half of a fetch's cost
        ),
        name="ragged_paged_attention_decode",
        interpret=interpret,
    )(*prefetch, *operands, list(pool))
    return out, pool


def _scratch_shapes(shape: Shape, config: Config) -> Scratch:
    heads, groups, layout = shape.num_kv_heads, shape.groups, shape.layout
    slot = (config.num_slots, config.decode_fetch_pages, heads, config.page_size, layout.lanes)
    scales = None
    if shape.is_quantised:
        page = (shape.scale_rows, shape.scale_lanes)
        scales = ScaleScratch(
            pltpu.VMEM((*slot[:2], *page), jnp.float32),
            pltpu.VMEM((2, *page), jnp.float32),
            pltpu.VMEM((shape.scale_rows, config.decode_block_pages * config.page_size), jnp.float32),
            *tpu_scales.scratch_shapes(shape),
        )
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
        scales=scales,
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


def _kernel(
    prefetch: Sequence[Any],
    q_ref: Any,
    new: New,
    sinks_ref: Any,
    _: Any,
    out_ref: Any,
    pool_ref: Any,
    *rest: Any,
    shape: Shape,
    config: Config,
    logits: Logits,
    num_cores: int,
) -> None:
    layer_ref, window_ref, num_decode_ref, cu_q_lens_ref, kv_lens_ref, table_ref = prefetch
    scales_ref = rest[0] if shape.is_quantised else None
    scratch = Scratch(*rest[shape.is_quantised :])
    core, step, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    ring = PageRing(
        pool_ref, scratch.slots, scratch.fetched, table_ref, shape.table_width, layer,
        scales_ref, None if scratch.scales is None else scratch.scales.slots,
    )  # fmt: skip
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
        walk = Walk(
            rows.num_decode, core, num_cores, cu_q_lens_ref, kv_lens_ref, table_ref, shape.table_width,
            config.write_tokens,
        )  # fmt: skip
        walk.run(TokenWriter(walk, new.heads, pool_ref, layer, scratch.new, scratch.rows, scratch.copied))
        if scratch.scales is not None:
            walk = walk._replace(size=shape.page_size)
            own = scratch.scales
            walk.run(tpu_scales.ScaleWriter(walk, new.head_scales, scales_ref, layer, own.new, own.pages, own.copied))
        for _ in range(ring.num_slots - 1):
            fetch_next()

    home = _Home(scratch, ring, shape)

    def attend(local: Any, _: None) -> None:
        row = (step * num_cores + core) * config.decode_rows + local

        @pl.when(row < rows.num_decode)
        def _() -> None:
            _attend_row(row, local, q_ref, new, out_ref, sinks_ref, ring, rows, fetch_next, home, scratch, logits)

    lax.fori_loop(0, config.decode_rows, attend, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _drain() -> None:
        for back in (1, 2):
            pl.when(cursor[WRITTEN] >= back)(lambda back=back: home.wait(cursor[WRITTEN] - back))


class _Home(NamedTuple):
    """The way of a new token's tile, and of its page's scales, back into the pool."""

    scratch: Scratch
    ring: PageRing
    shape: Shape

    def wait(self, count: Any) -> None:
        """Wait for write number `count`."""
        parity = lax.rem(count, 2)
        for tiles in self._buffers():
            pltpu.make_async_copy(tiles.at[parity], tiles.at[parity], self.scratch.written.at[parity]).wait()

    def write(self, count: Any, row: Any, position: Any, tile: Any, scales: Any) -> None:
        """Start write number `count`: `tile` is the row's tile that holds `position`, `scales` its page's."""
        pl.when(count >= 2)(lambda: self.wait(count - 2))
        ring, scratch = self.ring, self.scratch
        parity, page_size, height = lax.rem(count, 2), self.shape.page_size, self.shape.tile_rows
        page = ring.table_ref[row * ring.table_width + position // page_size]
        rows = pl.ds(pl.multiple_of(lax.rem(position, page_size) // height * height, height), height)
        scratch.tiles[parity] = tile
        targets = [ring.pool_ref.at[ring.layer, page, :, rows, :]]
        if scratch.scales is not None:
            scratch.scales.tiles[parity] = scales
            targets.append(ring.scales_ref.at[ring.layer, page])
        for tiles, target in zip(self._buffers(), targets, strict=True):
            pltpu.make_async_copy(tiles.at[parity], target, scratch.written.at[parity]).start()

    def _buffers(self) -> list[Any]:
        scratch = self.scratch
        return [scratch.tiles] if scratch.scales is None else [scratch.tiles, scratch.scales.tiles]


def _attend_row(
    row: Any,
    local: Any,
    q_ref: Any,
    new: New,
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
            home.write(count, row, kv_len - 1, *_join(ring, slot, valid - 1, new, local, shape))
            cursor[WRITTEN] = count + 1
            first_lane = 0 if shape.layout.is_packed else shape.layout.value_start
            clear_rows(ring.slots_ref, slot, valid, num_blocks * block, shape.tile_rows, first_lane)

        def attend_block(j: Any, _: None) -> None:
            start = first * page_size + j * block
            position = start + lax.broadcasted_iota(jnp.int32, (shape.groups, block), 1)
            visible = (position < kv_len) & (position >= rows.first_position(row))
            if scratch.scales is not None:
                tpu_scales.spread(
                    scratch.scales.slots, slot, j * block_pages, kv_len - start, shape, scratch.scales.block
                )

            def attend_heads(i: Any, _: None) -> None:
                heads = [i * together + head for head in range(together)]
                pages = pl.ds(j * block_pages, block_pages)
                cached = [HeadBlock(ring.slots_ref.at[slot, pages, head]) for head in heads]
                if scratch.scales is not None:
                    scales = [tpu_scales.of_head(scratch.scales.block, head) for head in heads]
                    cached = [HeadBlock(block.ref, *own) for block, own in zip(cached, scales, strict=True)]
                states = [(scratch.peak.at[head], scratch.total.at[head], scratch.acc.at[head]) for head in heads]
                update([q_ref[local, head] for head in heads], cached, visible, states, logits)

            lax.fori_loop(0, shape.num_kv_heads // together, attend_heads, None)

        lax.fori_loop(0, num_blocks, attend_block, None)
        cursor[CONSUMED] = cursor[CONSUMED] + 1

    lax.fori_loop(0, num_fetches, attend_fetch, None)
    for head in range(shape.num_kv_heads):
        out_ref[local, head] = result(scratch.total[head], scratch.acc[head]).astype(out_ref.dtype)


def _join(ring: PageRing, slot: Any, last: Any, new: New, local: Any, shape: Shape) -> tuple[Any, Any]:
    """The tile of the slot that holds row `last`, with the new token there and zeros behind, and its page's scales.

    The slot has them too.
    """
    height, page_size = shape.tile_rows, shape.page_size
    page, token = last // page_size, lax.rem(last, page_size)
    rows = pl.ds(pl.multiple_of(token // height * height, height), height)
    tile_ref = ring.slots_ref.at[slot, page, :, rows, :]
    row = lax.broadcasted_iota(jnp.int32, tile_ref.shape, 1)
    offset = lax.rem(last, height)
    old = jnp.where(row < offset, tile_ref[...].astype(jnp.float32), 0.0)
    values = new.tokens[local].astype(jnp.float32)
    tile = jnp.where(row == offset, values[:, None, :], old).astype(ring.slots_ref.dtype)
    tile_ref[...] = tile
    if new.token_scales is None:
        return tile, None
    scales = tpu_scales.joined(ring.scale_slots_ref[slot, page], token, new.token_scales[local])
    ring.scale_slots_ref[slot, page] = scales
    return tile, scales
