"""Quantised keys and values: as near as 8 bits allow, whatever the size of a head's numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.quantisation import is_quantised, quantise

DTYPES = ("int8", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_half_a_step(dtype):
    sizes = 10.0 ** np.arange(-9, 9, 3)[:, None, None]
    x = jnp.asarray(sizes * np.random.default_rng(0).normal(size=(6, 40, 64)), jnp.float32)
    values, scales = quantise(x, dtype)
    assert values.dtype == dtype
    assert scales.shape == (6, 40)
    error = np.abs(np.asarray(values, np.float32) * np.asarray(scales)[..., None] - x)
    largest = np.max(np.abs(x), axis=-1, keepdims=True)
    # int8 has 127 equal steps; a float8 has 4 bits of each number, and equal steps of 2**-9 near zero.
    bound = largest / 127 / 2 if dtype == "int8" else np.maximum(np.abs(x) / 16, largest / 448 / 2**10)
    assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_zeros_are_exact(dtype):
    values, scales = quantise(jnp.asarray([[0.0, -3.0, 1.5], [0.0, 0.0, 0.0]]), dtype)
    np.testing.assert_allclose(np.asarray(values, np.float32)[0, 1] * scales[0], -3.0, rtol=1e-6)
    assert not np.asarray(values, np.float32)[1].any()
    assert np.isfinite(scales).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_not_hidden(dtype):
    _, scales = quantise(jnp.asarray([[1.0, np.nan], [1.0, 2.0]]), dtype)
    np.testing.assert_array_equal(np.isnan(scales), [True, False])


def test_hand_worked_example():
    values, scales = quantise(jnp.asarray([2.54, -1.0, 0.0]), "int8")
    np.testing.assert_allclose(scales, 0.02, rtol=1e-6)
    np.testing.assert_array_equal(values, [127, -50, 0])


def test_which_types_are_quantised():
    assert [is_quantised(name) for name in ("float32", "bfloat16", "int8", "float8_e4m3fn")] == [0, 0, 1, 1]
