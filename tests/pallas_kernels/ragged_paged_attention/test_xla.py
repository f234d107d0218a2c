"""The xla backend's promises to the engine: the pool stays where it is, and layers may be unrolled or scanned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import AttentionMetadata, copy_pages, make_pool, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.xla import TOKENWISE
from pallas_kernels.ragged_paged_attention.xla_tiling import FLOAT8_UNIT, choose_tiling, to_float32

NUM_LAYERS, NUM_PAGES, WIDTH = 3, 4000, 64


def make_case(num_tokens: int, dtype: str = "float32"):
    """A batch of a decode row and, where T allows it, a longer one, with a pool of 94 MB in float32."""
    q_lens = [1] if num_tokens == 1 else [1, num_tokens - 1]
    kv_lens = [30] if num_tokens == 1 else [30, num_tokens + 9]
    table = np.random.default_rng(0).permutation(NUM_PAGES)[: len(q_lens) * WIDTH].reshape(len(q_lens), WIDTH)
    metadata = AttentionMetadata(
        *(jnp.asarray(x, jnp.int32) for x in (np.cumsum([0, *q_lens]), kv_lens, table, q_lens.count(1)))
    )
    pool = make_pool(
        "xla", num_layers=NUM_LAYERS, num_pages=NUM_PAGES, page_size=16, num_kv_heads=2, head_dim=32, dtype=dtype
    )
    return jax.random.normal(jax.random.key(1), (num_tokens, 4, 32)), pool, metadata


def attend(x, pool, layer, metadata):
    """A layer whose keys and values come from the one before, as every model's do."""
    k, v = x[:, :2], 0.5 * x[:, 2:]
    out, pool = ragged_paged_attention(x, k, v, pool, layer, metadata, scale=0.2)
    return x + out, pool


def unrolled(x, pool, metadata):
    for layer in range(NUM_LAYERS):
        x, pool = attend(x, pool, layer, metadata)
    return x, pool


def scanned(x, pool, metadata):
    def body(carry, layer):
        return attend(*carry, layer, metadata), None

    return jax.lax.scan(body, (x, pool), jnp.arange(NUM_LAYERS))[0]


def num_bytes(pool):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pool))


@pytest.mark.parametrize("step", [unrolled, scanned])
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [
        (1, "float32"),
        (TOKENWISE, "float32"),
        (40, "float32"),
        (1, "bfloat16"),
        (40, "bfloat16"),
        (40, "float16"),
        (1, "int8"),
        (40, "int8"),
        (1, "float8_e4m3fn"),
        (40, "float8_e4m3fn"),
    ],
)
def test_the_pool_is_updated_in_place(step, num_tokens, dtype):
    x, pool, metadata = make_case(num_tokens, dtype)
    compiled = jax.jit(step, donate_argnums=1).lower(x, pool, metadata).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(pool)
    assert memory.temp_size_in_bytes < num_bytes(pool) / NUM_LAYERS / 4


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_copied_pages_leave_the_pool_in_place(dtype):
    _, pool, _ = make_case(1, dtype)
    pages = jnp.arange(8)
    compiled = jax.jit(copy_pages, static_argnums=3, donate_argnums=0).lower(pool, pages, pages + 9, "xla").compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(pool)
    assert memory.temp_size_in_bytes < num_bytes(pool) / 20


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_scanned_layers_equal_unrolled_ones(num_tokens):
    x, pool, metadata = make_case(num_tokens)
    expected, expected_pool = jax.jit(unrolled)(x, pool, metadata)
    out, out_pool = jax.jit(scanned)(x, pool, metadata)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out_pool, expected_pool, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_traced_window_of_zero_is_no_window(num_tokens):
    x, pool, metadata = make_case(num_tokens)
    attention = jax.jit(lambda window: ragged_paged_attention(
        x, x[:, :2], x[:, 2:], pool, 0, metadata, scale=0.2, window=window
    )[0])  # fmt: skip
    expected, _ = ragged_paged_attention(x, x[:, :2], x[:, 2:], pool, 0, metadata, scale=0.2)
    np.testing.assert_allclose(attention(jnp.int32(0)), expected, rtol=1e-6, atol=1e-6)
    assert np.abs(attention(jnp.int32(3)) - expected).max() > 1e-3


def test_a_bfloat16_pool_only_rounds_what_it_holds():
    x, pool, metadata = make_case(40, "bfloat16")
    out, _ = jax.jit(unrolled)(x, pool, metadata)
    assert out.dtype == jnp.float32
    exact, _ = jax.jit(unrolled)(x, make_case(40)[1], metadata)
    np.testing.assert_allclose(out, exact, rtol=0.02, atol=0.02)
    assert np.abs(out - exact).max() > 0


def test_bfloat16_bits_are_moved_faithfully():
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    values = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    np.testing.assert_array_equal(to_float32(bits), np.asarray(values).astype(np.float32))


def test_float8_bits_are_read_faithfully():
    bits = jnp.arange(256, dtype=jnp.uint8)
    values = np.asarray(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)).astype(np.float32)
    read = FLOAT8_UNIT * np.asarray(jax.jit(to_float32)(bits))
    is_number = np.isfinite(values)
    np.testing.assert_array_equal(read[is_number], values[is_number])
    assert np.isfinite(read).all()


def test_a_dtype_without_a_pool_is_declined():
    with pytest.raises(NotImplementedError, match="int8 or float8_e4m3fn, got int16"):
        make_case(1, "int16")


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 2048])
@pytest.mark.parametrize("num_heads", [1, 9, 64, 200])
@pytest.mark.parametrize(("page_size", "width"), [(1, 1), (1, 9), (16, 3), (16, 4096), (4096, 2)])
def test_tilings_fit_every_shape(num_tokens, num_heads, page_size, width):
    tiling = choose_tiling(num_tokens, num_heads, num_heads, 64, page_size, width)
    assert min(tiling) >= 1
    assert max(tiling.chunk_pages, tiling.edge_pages) <= width
    assert tiling.tile <= num_tokens
