"""The mixed kernel: query tiles of rows with several query tokens over pages that already hold their own tokens.

Grid (cores, query tiles); a tile is `query_tokens` tokens of the batch, whatever rows they belong to, so queries
and results stay aligned and are pipelined by Pallas. The rows of a tile take turns; each touches only its own
queries' softmax. Pages come through a ring of slots that runs ahead over rows and tiles.
"""

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

FETCH_TILE, FETCH_ROW, FETCH_BLOCK, ISSUED, CONSUMED, ROW = range(NUM_CURSORS := 6)
PREFETCH = ("layer", "window", "num_decode_rows", "cu_q_lens", "kv_lens", "table")


def mixed(
    q: Float[Array, "T K G H"],
    decoded: Float[Array, "T K G H"],
    pool: Sequence[jax.Array],
    sinks: Float[Array, "K rows lanes"] | None,
    scalars: dict[str, Int32[Array, "..."]],
    shape: Shape,
    config: Config,
    logits: Logits,
    num_cores: int,
    interpret: Any,
) -> Float[Array, "T K G H"]:
    """Results of every token: the decode rows' from `decoded`, whose memory is used, zeros for padding."""
    steps = q.shape[0] // (config.query_tokens * num_cores)
    tile = pl.BlockSpec((config.query_tokens, *q.shape[1:]), lambda core, step, *_: (step * num_cores + core, 0, 0, 0))
    sinks_spec = None if sinks is None else pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0))
    hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)
    prefetch = [scalars[name] for name in PREFETCH]
    return pl.pallas_call(
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
            in_specs=[tile, tile, sinks_spec, [hbm] * len(pool)],
            out_specs=tile,
            scratch_shapes=_scratch_shapes(shape, config),
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={len(prefetch) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=config.vmem_limit_bytes,
            disable_bounds_checks=True,  # page numbers are in range by contract; a check is half of a fetch's cost
        ),
        name="ragged_paged_attention_mixed",
        interpret=interpret,
    )(*prefetch, q, decoded, sinks, list(pool))


class Scratch(NamedTuple):
    """The kernel's own memory."""

    slots: Any
    q: Any  # [K, rows, H] the tile's queries by kv head
    peak: Any  # [K, rows, 128]
    total: Any  # [K, rows, 128]
    acc: Any  # [K, rows, H]
    cursor: Any  # SMEM
    fetched: Any
    scale_slots: Any
    block_scales: Any  # [rows, S]


def _scratch_shapes(shape: Shape, config: Config) -> Scratch:
    heads, layout, height = shape.num_kv_heads, shape.layout, config.query_tokens * shape.groups
    slot = (config.num_slots, config.mixed_fetch_pages, heads, config.page_size, layout.lanes)
    scale_slots = block_scales = None
    if shape.is_quantised:
        scale_slots = pltpu.VMEM((*slot[:2], shape.scale_rows, shape.scale_lanes), jnp.float32)
        block_scales = pltpu.VMEM((shape.scale_rows, config.mixed_block_pages * config.page_size), jnp.float32)
    return Scratch(
        pltpu.VMEM(slot, shape.pool_dtype),
        pltpu.VMEM((heads, height, layout.head_lanes), shape.compute_dtype),
        pltpu.VMEM((heads, height, LANES), jnp.float32),
        pltpu.VMEM((heads, height, LANES), jnp.float32),
        pltpu.VMEM((heads, height, layout.head_lanes), jnp.float32),
        pltpu.SMEM((8,), jnp.int32),
        pltpu.SemaphoreType.DMA((config.num_slots,)),
        scale_slots,
        block_scales,
    )


class _Turn(NamedTuple):
    """One row's part of one tile: its tokens there, and what it sees of its pages."""

    first_token: Any
    end_token: Any
    shift: Any
    """Position of a token less its place in the batch."""
    first_page: Any
    stop: Any
    """One past the last position that any of these tokens sees."""
    end_page: Any


class _Plan(NamedTuple):
    """The scalars that say whose turn it is."""

    cu_q_lens: Any
    kv_lens: Any
    window: Any
    page_size: int
    query_tokens: int

    def turn(self, tile: Any, row: Any) -> _Turn:
        """The row's part of the tile."""
        first = jnp.maximum(self.cu_q_lens[row], tile * self.query_tokens)
        end = jnp.minimum(self.cu_q_lens[row + 1], (tile + 1) * self.query_tokens)
        shift = self.kv_lens[row] - self.cu_q_lens[row + 1]
        start = jnp.where(self.window > 0, jnp.maximum(first + shift - self.window + 1, 0), 0)
        stop = end + shift
        return _Turn(first, end, shift, start // self.page_size, stop, (stop + self.page_size - 1) // self.page_size)

    def settle(self, tile: Any, row: Any) -> Any:
        """The first row at or after `row` that ends behind the tile's beginning and is not empty; R if none does."""
        num_rows = self.kv_lens.shape[0]

        def is_past(row: Any) -> Any:
            known = jnp.minimum(row, num_rows - 1)
            end = self.cu_q_lens[known + 1]
            return (row < num_rows) & (end <= jnp.maximum(tile * self.query_tokens, self.cu_q_lens[known]))

        return lax.while_loop(is_past, lambda row: row + 1, row)

    def is_in(self, tile: Any, row: Any) -> Any:
        """Whether a settled row has tokens in the tile."""
        num_rows = self.kv_lens.shape[0]
        first = self.cu_q_lens[jnp.minimum(row, num_rows - 1)]
        return (row < num_rows) & (first < (tile + 1) * self.query_tokens)

    def tiles(self, num_decode: Any) -> tuple[Any, Any]:
        """The range of tiles with tokens behind the decode rows'."""
        num_tokens = self.cu_q_lens[self.kv_lens.shape[0]]
        end = (num_tokens + self.query_tokens - 1) // self.query_tokens
        return num_decode // self.query_tokens, jnp.where(num_tokens > num_decode, end, 0)


class _Fetcher(NamedTuple):
    """Runs ahead of the matmuls: knows which pages are due next, over blocks, rows and tiles."""

    ring: PageRing
    plan: _Plan
    cursor: Any
    end_tile: Any
    num_cores: int

    def begin(self, tile: Any, num_decode: Any) -> None:
        """Start with the core's first tile, and fill all slots but one."""
        for i in range(NUM_CURSORS):
            self.cursor[i] = 0
        self.cursor[FETCH_TILE] = tile
        self.cursor[FETCH_ROW] = self.plan.settle(tile, num_decode)
        self.cursor[ROW] = num_decode
        for _ in range(self.ring.num_slots - 1):
            self.fetch()

    def fetch(self) -> None:
        """Start fetching the next slot's pages, if any are left."""
        ring, plan, cursor = self.ring, self.plan, self.cursor
        tile = cursor[FETCH_TILE]

        @pl.when(tile < self.end_tile)
        def _() -> None:
            row = cursor[FETCH_ROW]
            turn = plan.turn(tile, row)
            first = turn.first_page + cursor[FETCH_BLOCK] * ring.fetch_pages
            num_pages = jnp.minimum(turn.end_page - first, ring.fetch_pages)
            ring.start(lax.rem(cursor[ISSUED], ring.num_slots), row, first, num_pages)
            ends_row = first + num_pages == turn.end_page
            following = plan.settle(tile, row + 1)
            ends_tile = ends_row & ~plan.is_in(tile, following)
            next_tile = jnp.where(ends_tile, tile + self.num_cores, tile)
            cursor[FETCH_TILE] = next_tile
            cursor[FETCH_ROW] = plan.settle(next_tile, jnp.where(ends_row & ~ends_tile, following, row))
            cursor[FETCH_BLOCK] = jnp.where(ends_row, 0, cursor[FETCH_BLOCK] + 1)
            cursor[ISSUED] = cursor[ISSUED] + 1


def _kernel(
    prefetch: Sequence[Any],
    q_ref: Any,
    decoded_ref: Any,
    sinks_ref: Any,
    pool: Sequence[Any],
    out_ref: Any,
    *scratch_refs: Any,
    shape: Shape,
    config: Config,
    logits: Logits,
    num_cores: int,
) -> None:
    layer_ref, window_ref, num_decode_ref, cu_q_lens_ref, kv_lens_ref, table_ref = prefetch
    scratch = Scratch(*scratch_refs)
    core, step = pl.program_id(0), pl.program_id(1)
    tile, num_decode = step * num_cores + core, num_decode_ref[0]
    ring = PageRing(
        pool[0], scratch.slots, scratch.fetched, table_ref, shape.table_width, layer_ref[0],
        pool[1] if shape.is_quantised else None, scratch.scale_slots,
    )  # fmt: skip
    plan = _Plan(cu_q_lens_ref, kv_lens_ref, window_ref[0], config.page_size, config.query_tokens)
    first_tile, end_tile = plan.tiles(num_decode)
    fetcher = _Fetcher(ring, plan, scratch.cursor, end_tile, num_cores)

    @pl.when(step == 0)
    def _begin() -> None:
        own_first = (first_tile + num_cores - 1 - core) // num_cores * num_cores + core
        fetcher.begin(own_first, num_decode)

    def store(head: Any, mixed_out: Any) -> None:
        token = tile * config.query_tokens + lax.broadcasted_iota(jnp.int32, mixed_out.shape, 0)
        kept = decoded_ref[:, head].astype(jnp.float32)
        out_ref[:, head] = jnp.where(token < num_decode, kept, mixed_out).astype(out_ref.dtype)

    is_active = (tile >= first_tile) & (tile < end_tile)

    @pl.when(is_active)
    def _attend() -> None:
        logits.reset(scratch.peak, scratch.total, scratch.acc, sinks_ref)

        def gather(head: Any, _: None) -> None:
            scratch.q[head] = q_ref[:, head].reshape(scratch.q.shape[1:])

        lax.fori_loop(0, shape.num_kv_heads, gather, None)

        def take(row: Any) -> Any:
            _take_turn(tile, plan.turn(tile, row), fetcher, scratch, logits, shape, config)
            scratch.cursor[ROW] = row
            return plan.settle(tile, row + 1)

        lax.while_loop(lambda row: plan.is_in(tile, row), take, plan.settle(tile, scratch.cursor[ROW]))

        def finish(head: Any, _: None) -> None:
            mixed_out = result(scratch.total[head], scratch.acc[head])
            store(head, mixed_out.reshape(out_ref.shape[0], *out_ref.shape[2:]))

        lax.fori_loop(0, shape.num_kv_heads, finish, None)

    @pl.when(~is_active)
    def _idle() -> None:
        zeros = jnp.zeros((out_ref.shape[0], *out_ref.shape[2:]), jnp.float32)
        lax.fori_loop(0, shape.num_kv_heads, lambda head, _: store(head, zeros), None)


def _take_turn(
    tile: Any, turn: _Turn, fetcher: _Fetcher, scratch: Scratch, logits: Logits, shape: Shape, config: Config
) -> None:
    ring, cursor, page_size = fetcher.ring, scratch.cursor, config.page_size
    block = config.mixed_block_pages * page_size
    num_fetches = (turn.end_page - turn.first_page + ring.fetch_pages - 1) // ring.fetch_pages

    def take_fetch(i: Any, _: None) -> None:
        slot = lax.rem(cursor[CONSUMED], ring.num_slots)
        fetcher.fetch()
        first = turn.first_page + i * ring.fetch_pages
        ring.wait(slot, jnp.minimum(turn.end_page - first, ring.fetch_pages))
        valid = jnp.minimum(turn.stop - first * page_size, ring.fetch_pages * page_size)
        num_blocks = (valid + block - 1) // block

        @pl.when(i == num_fetches - 1)
        def _() -> None:
            first_lane = 0 if shape.layout.is_packed else shape.layout.value_start
            clear_rows(ring.slots_ref, slot, valid, num_blocks * block, shape.tile_rows, first_lane)

        def take_block(j: Any, _: None) -> None:
            pages = ring.slots_ref.at[slot, pl.ds(j * config.mixed_block_pages, config.mixed_block_pages)]
            start = first * page_size + j * block
            if scratch.block_scales is not None:
                first_page = j * config.mixed_block_pages
                tpu_scales.spread(scratch.scale_slots, slot, first_page, turn.stop - start, shape, scratch.block_scales)
            _take_block(pages, start, tile, turn, fetcher.plan, scratch, logits, shape.groups, config)

        lax.fori_loop(0, num_blocks, take_block, None)
        cursor[CONSUMED] = cursor[CONSUMED] + 1

    lax.fori_loop(0, num_fetches, take_fetch, None)


def _take_block(
    pages_ref: Any,  # [pages, K, page_size, C]
    start: Any,
    tile: Any,
    turn: _Turn,
    plan: _Plan,
    scratch: Scratch,
    logits: Logits,
    groups: int,
    config: Config,
) -> None:
    """Attend to the pages, which begin at position `start`, with the tile's queries that are the row's."""
    tile_start, block = tile * config.query_tokens, config.mixed_block_pages * config.page_size

    def attend(first: Any, num_tokens: int, is_masked: bool) -> None:
        visible = _visible(tile_start + first, num_tokens, turn, plan, groups, start, block) if is_masked else None
        rows = pl.ds(pl.multiple_of(first * groups, 16), num_tokens * groups)

        def attend_head(head: Any, _: None) -> None:
            state = (scratch.peak.at[head, rows], scratch.total.at[head, rows], scratch.acc.at[head, rows])
            cached = HeadBlock(pages_ref.at[:, head])
            if scratch.block_scales is not None:
                cached = HeadBlock(cached.ref, *tpu_scales.of_head(scratch.block_scales, head))
            update([scratch.q[head, rows, :]], [cached], visible, [state], logits)

        lax.fori_loop(0, scratch.q.shape[0], attend_head, None)

    own = turn.end_token - turn.first_token
    seen_by_all = (own == config.query_tokens) & (start + block <= turn.first_token + turn.shift + 1)
    seen_by_all &= (plan.window <= 0) | (start > turn.stop - 1 - plan.window)
    # A tile that is no wider than a part of one has one masked way through, not two.
    is_wide = (own > config.query_tokens // 2) & (config.narrow_tokens < config.query_tokens)
    pl.when(seen_by_all)(lambda: attend(0, config.query_tokens, False))
    if config.narrow_tokens < config.query_tokens:
        pl.when(is_wide & ~seen_by_all)(lambda: attend(0, config.query_tokens, True))

    @pl.when(~is_wide & ~seen_by_all)
    def _narrow() -> None:
        width = config.narrow_tokens
        first, last = turn.first_token - tile_start, turn.end_token - 1 - tile_start
        lax.fori_loop(first // width, last // width + 1, lambda i, _: attend(i * width, width, True), None)


def _visible(first_token: Any, num_tokens: int, turn: _Turn, plan: _Plan, groups: int, start: Any, block: int) -> Array:
    """Which of the block's positions each query row sees: causal, in its window, and only this row's queries."""
    row = lax.broadcasted_iota(jnp.int32, (num_tokens * groups, 1), 0)
    # Exact for rows below 2**20, and a vector has no integer division.
    token = first_token + ((row.astype(jnp.float32) + 0.5) * (1.0 / groups)).astype(jnp.int32)
    position = token + turn.shift
    is_own = (token >= turn.first_token) & (token < turn.end_token)
    last = jnp.where(is_own, position, -1)
    first = jnp.where(plan.window > 0, position - plan.window + 1, 0)
    column = start + lax.broadcasted_iota(jnp.int32, (num_tokens * groups, block), 1)
    return (column <= last) & (column >= first)
