"""What a page looks like in TPU memory, and block sizes that fit a chip: pure functions of shapes and chip facts."""

from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.quantisation import is_quantised

LANES = 128
MIB = 1 << 20
VMEM_SHARE = 0.75
"""Share of VMEM that the kernels plan with; the rest is the compiler's: spilled registers, scores, padding."""
SMEM_SHARE = 0.75


class Chip(NamedTuple):
    """The facts of one core that block sizes depend on."""

    vmem_bytes: int
    smem_bytes: int
    bytes_per_second: float
    """HBM bandwidth of one core."""
    num_cores: int
    """Cores that one device drives: 2 where the compiler joins two into a megacore."""

    @classmethod
    def current(cls) -> Self:
        """The chip that programs are now compiled for; ValueError when it is no TPU."""
        info = pltpu.get_tpu_info()
        return cls(
            info.vmem_capacity_bytes, info.smem_capacity_bytes, info.mem_bw_bytes_per_second, max(1, info.num_cores)
        )


INTERPRETED = Chip(vmem_bytes=16 * MIB, smem_bytes=MIB, bytes_per_second=8e11, num_cores=1)
"""What interpret mode pretends to be: the smallest memories of any chip we compile for."""


class PageLayout(NamedTuple):
    """How the keys and values of one token and kv head lie in lanes.

    Up to 64 wide, a key and its value share one row of 128 lanes; a wider one has whole rows for each, so that
    no head is ever cut out of a row by the kernel.
    """

    head_dim: int
    is_latent: bool = False
    """The value is the beginning of the key, and takes no lanes of its own."""

    @property
    def is_packed(self) -> bool:
        """Whether key and value share one row of lanes."""
        return self.is_latent or self.head_dim <= LANES // 2

    @property
    def lanes(self) -> int:
        """Lanes of a token's key and value together."""
        return self.head_lanes if self.is_packed else 2 * self.head_lanes

    @property
    def head_lanes(self) -> int:
        """Lanes that a query, and a result before it is cut, takes."""
        return round_up(self.head_dim, LANES)

    @property
    def value_start(self) -> int:
        """The lane at which the value begins."""
        if self.is_latent:
            return 0
        return LANES // 2 if self.is_packed else self.head_lanes

    @property
    def result_start(self) -> int:
        """The lane of a result row at which the head's own values begin."""
        return self.value_start if self.is_packed else 0


class Config(NamedTuple):
    """Block sizes of the two kernels; tokens are cached tokens except where queries are meant."""

    page_size: int
    decode_fetch_pages: int
    """Pages that one buffer slot holds in the decode kernel: what is in flight."""
    decode_block_pages: int
    """Pages that one round of matmuls reads: a divisor of `decode_fetch_pages`."""
    decode_rows: int
    """Rows a grid step of the decode kernel takes queries for: a divisor of `query_tokens`."""
    mixed_fetch_pages: int
    mixed_block_pages: int
    query_tokens: int
    """Query tokens of a tile of the mixed kernel."""
    narrow_tokens: int
    """Query tokens taken at a time where a row has only a few in a tile: a divisor of `query_tokens`."""
    num_slots: int
    """Buffer slots that pages are fetched into; all but one are in flight while one is read."""
    write_tokens: int
    """New tokens of longer rows written at a time."""
    vmem_limit_bytes: int


class Shape(NamedTuple):
    """The static sizes of one call."""

    num_tokens: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    table_width: int
    pool_dtype: Any
    is_latent: bool = False

    @property
    def layout(self) -> PageLayout:
        """How a token lies in a page."""
        return PageLayout(self.head_dim, self.is_latent)

    @property
    def groups(self) -> int:
        """Query heads of one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantised(self) -> bool:
        """Whether pages have scales."""
        return is_quantised(self.pool_dtype)

    @property
    def compute_dtype(self) -> Any:
        """What queries, results and operands of the matrix unit are: quantised pages are exact in bfloat16."""
        return jnp.bfloat16 if self.is_quantised else self.pool_dtype

    @property
    def scale_rows(self) -> int:
        """Rows of a page's scales (`scale_rows`)."""
        return scale_rows(self.num_kv_heads)

    @property
    def scale_lanes(self) -> int:
        """Lanes of a row of a page's scales, a token in each; those past `page_size` are padding."""
        return round_up(self.page_size, LANES)

    @property
    def page_bytes(self) -> int:
        """Bytes of VMEM that one page of one layer takes."""
        values = self.page_size * self.num_kv_heads * self.layout.lanes * jnp.dtype(self.pool_dtype).itemsize
        return values + (4 * round_up(self.scale_rows, 8) * self.scale_lanes if self.is_quantised else 0)

    @property
    def tile_rows(self) -> int:
        """Tokens of one hardware tile of a page: what a write-back must be aligned to."""
        return tile_rows(self.pool_dtype)

    @property
    def padded_groups(self) -> int:
        """Rows that the query heads of one token and kv head take where they are the second-last axis."""
        return next((n for n in (2, 4, 8) if n >= self.groups), round_up(self.groups, 16))


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def scale_rows(num_kv_heads: int) -> int:
    """Rows of a page's scales: one for each kv head's keys and one for its values, and padding to whole tiles.

    XLA and Mosaic agree about tiles of 2, 4 and 8 rows; they lay out 6 differently, and XLA would copy the pool.
    """
    rows = 2 * num_kv_heads
    return next((n for n in (2, 4, 8) if n >= rows), round_up(rows, 8))


def tile_rows(dtype: Any) -> int:
    """Rows of one hardware tile."""
    return 32 // jnp.dtype(dtype).itemsize


def check_pages(page_size: int, dtype: Any) -> None:
    """Raise where no kernel here can serve such pages."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32) and not is_quantised(dtype):
        raise NotImplementedError(
            f"the tpu backend keeps bfloat16, float32, int8 or float8_e4m3fn pages, got {jnp.dtype(dtype)}."
        )
    if page_size % tile_rows(dtype):
        raise ValueError(
            f"page_size must be a multiple of {tile_rows(dtype)} for {jnp.dtype(dtype).name} pages on TPU, got "
            f"{page_size}."
        )


def smem_bytes(shape: Shape) -> int:
    """Bytes of scalar memory that a call's page table and row lengths take."""
    return 4 * (shape.num_rows * (shape.table_width + 2) + 512)


def check(shape: Shape, chip: Chip) -> None:
    """Raise ValueError where the kernels cannot serve this shape at all, saying what would."""
    check_pages(shape.page_size, shape.pool_dtype)
    allowed = int(SMEM_SHARE * chip.smem_bytes)
    if smem_bytes(shape) <= allowed:
        return
    tokens, page_size = shape.table_width * shape.page_size, shape.page_size
    while page_size < tokens:
        page_size *= 2
        if smem_bytes(shape._replace(table_width=-(-tokens // page_size))) <= allowed:
            advice = f"page size {page_size} would fit"
            break
    else:
        advice = "no page size would fit: lower the number of rows"
    raise ValueError(
        f"the page table of {shape.num_rows} rows x {shape.table_width} pages takes {smem_bytes(shape)} bytes of "
        f"scalar memory, the chip has {allowed} for it: {advice}."
    )


def choose(shape: Shape, chip: Chip) -> Config:
    """Block sizes for this shape: as large as pays, then halved until both kernels fit the chip's VMEM."""
    check(shape, chip)
    page = shape.page_size
    in_flight = chip.bytes_per_second * 2e-6  # what two microseconds of HBM bandwidth carry hides its latency
    fetch_tokens = min(2048, max(256, int(in_flight * page / shape.page_bytes)))
    block_tokens, query_rows, num_slots, decode_rows = 256, 512, 3, 8
    while True:
        config = _config(shape, chip, fetch_tokens, block_tokens, query_rows, num_slots, decode_rows)
        planned = max(decode_vmem_bytes(shape, config), mixed_vmem_bytes(shape, config))
        if planned <= VMEM_SHARE * chip.vmem_bytes:
            return config
        if fetch_tokens > block_tokens and fetch_tokens > page:
            fetch_tokens //= 2
        elif num_slots > 2:
            num_slots = 2
        elif query_rows > 64 and config.query_tokens > 16:
            query_rows //= 2
        elif decode_rows > 1:
            decode_rows //= 2
        elif block_tokens > max(page, 64):
            block_tokens, fetch_tokens = block_tokens // 2, fetch_tokens // 2
        else:
            raise ValueError(
                f"pages of {page} tokens x {shape.num_kv_heads} kv heads and {shape.num_heads} query heads do not fit "
                f"the chip's {chip.vmem_bytes} bytes of VMEM: {planned} bytes are needed; use smaller pages, bfloat16, "
                "more shards or another chip."
            )


def _config(
    shape: Shape, chip: Chip, fetch_tokens: int, block_tokens: int, query_rows: int, num_slots: int, decode_rows: int
) -> Config:
    page = shape.page_size
    block_pages = min(max(1, block_tokens // page), shape.table_width)
    fetch_pages = block_pages * max(1, min(fetch_tokens // page, shape.table_width) // block_pages)
    most = round_up(shape.num_tokens, 16)
    query_tokens = min(max(16, query_rows // shape.groups // 16 * 16), most)
    narrow = 16 if query_tokens % 32 or shape.groups > 4 else 32
    return Config(
        page_size=page,
        decode_fetch_pages=fetch_pages,
        decode_block_pages=block_pages,
        decode_rows=decode_rows,
        mixed_fetch_pages=fetch_pages,
        mixed_block_pages=block_pages,
        query_tokens=query_tokens,
        narrow_tokens=narrow,
        num_slots=num_slots,
        write_tokens=32 if page % 32 == 0 else 16,
        vmem_limit_bytes=int(0.95 * chip.vmem_bytes),
    )


def _ring_bytes(shape: Shape, config: Config, fetch_pages: int) -> int:
    return config.num_slots * fetch_pages * shape.page_bytes


def _scale_bytes(shape: Shape, rows: int, block_pages: int) -> int:
    """Bytes for scales besides the ring's: of new tokens, on their way home, and of one block."""
    if not shape.is_quantised:
        return 0
    lanes = 2 * rows * LANES + 4 * (shape.scale_lanes + LANES) + 2 * shape.scale_lanes + block_pages * shape.page_size
    return 4 * round_up(shape.scale_rows, 8) * lanes


def decode_vmem_bytes(shape: Shape, config: Config) -> int:
    """Bytes of VMEM that the decode kernel plans to use."""
    itemsize, layout = jnp.dtype(shape.compute_dtype).itemsize, shape.layout
    head_rows = shape.num_kv_heads * round_up(shape.groups, 8)
    rows = config.decode_rows * (
        2 * shape.num_kv_heads * shape.padded_groups * layout.head_lanes * itemsize
        + round_up(shape.num_kv_heads, 16) * layout.lanes * itemsize
    )
    state = head_rows * (2 * LANES + layout.head_lanes) * 4
    writes = 2 * shape.num_kv_heads * layout.lanes * (4 * (config.write_tokens + 8) + 2 * itemsize * 32)
    scores = 2 * head_rows * config.decode_block_pages * config.page_size * 4
    scales = _scale_bytes(shape, config.decode_rows, config.decode_block_pages)
    return _ring_bytes(shape, config, config.decode_fetch_pages) + 2 * rows + state + writes + scores + scales


def mixed_vmem_bytes(shape: Shape, config: Config) -> int:
    """Bytes of VMEM that the mixed kernel plans to use."""
    itemsize, lanes = jnp.dtype(shape.compute_dtype).itemsize, shape.layout.head_lanes
    tile_rows = config.query_tokens * shape.groups
    padded_rows = config.query_tokens * shape.padded_groups
    tiles = shape.num_kv_heads * (3 * 2 * padded_rows + tile_rows) * lanes * itemsize
    state = shape.num_kv_heads * tile_rows * (3 * LANES + lanes) * 4
    scores = 3 * tile_rows * config.mixed_block_pages * config.page_size * 4
    scales = _scale_bytes(shape, 0, config.mixed_block_pages)
    return _ring_bytes(shape, config, config.mixed_fetch_pages) + tiles + state + scores + scales
