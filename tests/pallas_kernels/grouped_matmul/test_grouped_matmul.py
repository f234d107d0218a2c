"""Every backend against numpy over groups of any size, with NaN wherever nothing may be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import backends, grouped_matmul
from pallas_kernels.grouped_matmul.cpu import choose_slab, choose_tile
from pallas_kernels.grouped_matmul.groups import group_rows, list_items

BACKENDS = ("cpu", "interpret", "ragged", "reference")
SIZES = st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(lambda sizes: sum(sizes) <= 40)

multiply = jax.jit(grouped_matmul, static_argnames="backend")


def expected(x, weights, sizes, first_group=0):
    out, row = np.zeros((sum(sizes), weights.shape[2])), 0
    for group, size in enumerate(sizes):
        out[row : row + size] = np.asarray(x[row : row + size], np.float64) @ np.asarray(weights[first_group + group])
        row += size
    return out


def case(sizes, num_padding, in_size, out_size, *, num_before=0, num_after=0, poison=False):
    """Rows, matrices and group sizes; NaN in padding rows and, with `poison`, in matrices that nobody needs."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sum(sizes) + num_padding, in_size)).astype(np.float32)
    x[sum(sizes) :] = np.nan
    weights = rng.standard_normal((num_before + len(sizes) + num_after, in_size, out_size)).astype(np.float32)
    if poison:
        is_used = np.zeros(len(weights), bool)
        is_used[num_before : num_before + len(sizes)] = np.array(sizes) > 0
        weights[~is_used] = np.nan
    return jnp.asarray(x), jnp.asarray(weights), jnp.array(sizes, jnp.int32)


def test_lists_backends_and_nothing_else():
    assert backends() == ["cpu", "interpret", "ragged", "reference", "tpu"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_by_hand(backend):
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [jnp.nan, jnp.inf]])
    weights = jnp.array([[[1.0], [10.0]], [[7.0], [7.0]], [[2.0], [0.0]]])
    out = grouped_matmul(x, weights, jnp.array([2, 0, 1]), backend=backend)
    np.testing.assert_array_equal(out[:3], [[21.0], [43.0], [10.0]])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(sizes=SIZES, shape=st.sampled_from([(24, 5), (130, 40)]), num_before=st.integers(0, 2))
def test_equals_numpy(backend, sizes, shape, num_before):
    # Sizes of arrays that do not vary: compiling takes all the time.
    x, weights, group_sizes = case(sizes, 40 - sum(sizes), *shape, num_before=num_before, num_after=2 - num_before)
    out = multiply(x, weights, group_sizes, first_group=jnp.int32(num_before), backend=backend)
    assert out.dtype == x.dtype
    np.testing.assert_allclose(out[: sum(sizes)], expected(x, weights, sizes, num_before), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "interpret"])
def test_matrices_that_no_row_needs_are_not_read(backend):
    x, weights, sizes = case([3, 0, 5, 0], 4, 16, 8, num_before=1, num_after=1, poison=True)
    out = grouped_matmul(x, weights, sizes, first_group=1, backend=backend)
    np.testing.assert_allclose(out[:8], expected(x, weights, [3, 0, 5, 0], 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_at_all_are_no_error(backend):
    x, weights, sizes = case([0, 0], 3, 8, 8)
    assert grouped_matmul(x, weights, sizes, backend=backend).shape == (3, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_and_large_groups(backend):
    sizes = [300, 1, 0, 129, 70]
    x, weights, group_sizes = case(sizes, 12, 32, 24)
    out = grouped_matmul(x, weights, group_sizes, backend=backend)
    np.testing.assert_allclose(out[: sum(sizes)], expected(x, weights, sizes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_summed_in_float32(backend):
    # 256 + 1 + 1 … cannot be counted in bfloat16.
    x = jnp.ones((2, 512), jnp.bfloat16)
    weights = jnp.ones((2, 512, 8), jnp.bfloat16).at[1].set(1 / 512)
    out = grouped_matmul(x, weights, jnp.array([1, 1]), backend=backend)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), [[512.0] * 8, [1.0] * 8])


def test_items_are_the_pairs_that_have_rows():
    items = list_items(group_rows(jnp.array([3, 0, 6, 1])), num_tiles=3, tile=4)
    count = int(items.num_needed)
    pairs = list(zip(items.groups[:count].tolist(), items.tiles[:count].tolist(), strict=True))
    assert pairs == [(0, 0), (2, 0), (2, 1), (2, 2), (3, 2)]


def test_sizes_of_the_cpu_loop():
    assert [choose_tile(*sizes) for sizes in ((8, 64), (2, 8), (128, 16), (4096, 8))] == [1, 1, 16, 128]
    assert choose_slab(2048, 4096) == 256
    assert choose_slab(2880, 4 * 2880) == 90
    assert choose_slab(7, 2**30) == 1


@pytest.mark.parametrize(
    ("x", "weights", "sizes", "message"),
    [
        ((4, 8), (2, 9, 8), (2,), r"must agree, got \(4, 8\) and \(2, 9, 8\)"),
        ((4, 8), (2, 8, 8), (3,), r"at most 2, got shape \(3,\)"),
        ((4, 8), (2, 8, 8), (2, 1), "one entry a group"),
    ],
)
def test_mistakes_are_refused(x, weights, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.zeros(x), jnp.zeros(weights), jnp.zeros(sizes, jnp.int32))


def test_wrong_types_and_names_are_refused():
    x, weights = jnp.zeros((4, 8)), jnp.zeros((2, 8, 8))
    with pytest.raises(ValueError, match="must hold integers, got float32"):
        grouped_matmul(x, weights, jnp.zeros(2))
    with pytest.raises(ValueError, match="backend must be one of cpu, interpret, ragged, reference, tpu"):
        grouped_matmul(x, weights, jnp.zeros(2, jnp.int32), backend="gpu")
    with pytest.raises(NotImplementedError, match="one type, got bfloat16, float32"):
        grouped_matmul(x.astype(jnp.bfloat16), weights, jnp.zeros(2, jnp.int32), backend="tpu")
