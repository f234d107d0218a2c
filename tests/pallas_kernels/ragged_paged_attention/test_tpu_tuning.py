"""Block sizes never exceed what a chip has, whatever the shape."""

import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention.tpu_tuning import (
    MIB,
    SMEM_SHARE,
    VMEM_SHARE,
    Chip,
    PageLayout,
    Shape,
    choose,
    decode_vmem_bytes,
    mixed_vmem_bytes,
    scale_rows,
    smem_bytes,
    tile_rows,
)

CHIPS = {
    "v4": Chip(16 * MIB, MIB, 6.1e11, 1),
    "v5p": Chip(64 * MIB, MIB, 1.4e12, 2),
    "v6e": Chip(128 * MIB, MIB, 1.64e12, 1),
}
LLAMA_8B = Shape(64, 64, 32, 8, 128, 16, 512, jnp.bfloat16)


@pytest.mark.parametrize(
    ("head_dim", "packed", "lanes", "value_start", "result_start"),
    [
        (16, True, 128, 64, 64), (64, True, 128, 64, 64), (80, False, 256, 128, 0), (128, False, 256, 128, 0),
        (256, False, 512, 256, 0),
    ],
)  # fmt: skip
def test_page_layout(head_dim, packed, lanes, value_start, result_start):
    layout = PageLayout(head_dim)
    found = (layout.is_packed, layout.lanes, layout.value_start, layout.result_start)
    assert found == (packed, lanes, value_start, result_start)


@settings(max_examples=300, deadline=None)
@given(
    chip=st.sampled_from(sorted(CHIPS)),
    num_tokens=st.sampled_from([1, 8, 64, 512, 2048, 8192]),
    num_rows=st.sampled_from([1, 8, 64, 256]),
    heads=st.sampled_from([(32, 8), (16, 8), (9, 3), (8, 1), (71, 1), (4, 4), (7, 7)]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    page_size=st.sampled_from([16, 32, 64, 128, 256]),
    width=st.sampled_from([1, 8, 33, 512]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn]),
)
def test_choice_fits_and_divides(chip, num_tokens, num_rows, heads, head_dim, page_size, width, dtype):
    # v4's VMEM is filled by 16 tokens, the fewest there are, of 71 query heads of 256 in float32, and by two pages of
    # 256 tokens of seven kv heads.
    is_tight = chip == "v4" and head_dim == 256 and dtype == jnp.float32
    assume(not (is_tight and (heads == (71, 1) or (page_size == 256 and heads[1] >= 7))))
    assume(page_size % tile_rows(dtype) == 0)
    shape = Shape(num_tokens, num_rows, *heads, head_dim, page_size, width, dtype)
    config = choose(shape, CHIPS[chip])
    planned = max(decode_vmem_bytes(shape, config), mixed_vmem_bytes(shape, config))
    assert planned <= VMEM_SHARE * CHIPS[chip].vmem_bytes
    assert config.decode_fetch_pages % config.decode_block_pages == 0
    assert config.mixed_fetch_pages % config.mixed_block_pages == 0
    assert config.query_tokens % config.narrow_tokens == 0
    assert config.query_tokens % 16 == 0
    assert config.query_tokens % config.decode_rows == 0
    assert config.page_size % config.write_tokens == 0
    assert config.write_tokens % shape.tile_rows == 0
    assert config.num_slots >= 2


def test_fetches_more_than_it_computes_with():
    config = choose(LLAMA_8B, CHIPS["v6e"])
    assert config.decode_fetch_pages > config.decode_block_pages


def test_page_table_too_large_for_smem_names_the_page_size_that_fits():
    shape = LLAMA_8B._replace(num_rows=256, table_width=131072 // 16)
    with pytest.raises(ValueError, match=r"the page table of 256 rows x 8192 pages .*: page size 256 would fit"):
        choose(shape, CHIPS["v6e"])
    assert choose(shape._replace(page_size=256, table_width=512), CHIPS["v6e"]).page_size == 256
    assert smem_bytes(shape._replace(page_size=128, table_width=1024)) > SMEM_SHARE * MIB


def test_too_many_rows_for_smem_at_any_page_size():
    with pytest.raises(ValueError, match="no page size would fit: lower the number of rows"):
        choose(LLAMA_8B._replace(num_rows=300_000, table_width=2), CHIPS["v6e"])


def test_refuses_pages_that_are_no_whole_tiles():
    with pytest.raises(ValueError, match="page_size must be a multiple of 16 for bfloat16 pages on TPU, got 24"):
        choose(LLAMA_8B._replace(page_size=24), CHIPS["v6e"])
    assert choose(LLAMA_8B._replace(page_size=24, pool_dtype=jnp.float32), CHIPS["v6e"]).page_size == 24


def test_declines_dtypes_it_has_no_kernel_for():
    with pytest.raises(NotImplementedError, match="keeps bfloat16, float32, int8 or float8_e4m3fn pages, got float16"):
        choose(LLAMA_8B._replace(pool_dtype=jnp.float16), CHIPS["v6e"])


def test_8_bit_pages_are_whole_tiles_of_32():
    with pytest.raises(ValueError, match="page_size must be a multiple of 32 for int8 pages on TPU, got 16"):
        choose(LLAMA_8B._replace(pool_dtype=jnp.int8), CHIPS["v6e"])
    shape = LLAMA_8B._replace(pool_dtype=jnp.int8, page_size=128)
    assert choose(shape, CHIPS["v6e"]).write_tokens == 32
    assert shape.compute_dtype == jnp.bfloat16
    # 128 tokens of 8 heads, key and value, and as many scales.
    assert shape.page_bytes == 128 * 8 * 2 * (128 + 4)


@pytest.mark.parametrize(("num_kv_heads", "rows"), [(1, 2), (2, 4), (3, 8), (4, 8), (5, 16), (8, 16), (9, 24)])
def test_scale_rows_are_whole_tiles(num_kv_heads, rows):
    assert scale_rows(num_kv_heads) == rows


def test_pages_that_cannot_fit_vmem():
    with pytest.raises(ValueError, match="do not fit the chip's 16777216 bytes of VMEM"):
        choose(LLAMA_8B._replace(num_heads=256, num_kv_heads=256, head_dim=256, page_size=256), CHIPS["v4"])
