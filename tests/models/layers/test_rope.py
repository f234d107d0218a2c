import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.rope import (
    RopeFrequencies,
    RopeParameters,
    RopeTable,
    _rotate_parts,
    _rotate_swapped,
    apply_rope,
    rope_frequencies,
    rope_table,
)

DIM = 64
PLAIN = np.array([10000 ** (-2 * i / DIM) for i in range(DIM // 2)])


def frequencies(max_model_len=None, **parameters) -> RopeFrequencies:
    rope = RopeParameters(**{"original_max_position_embeddings": 64, **parameters})
    return rope_frequencies(rope, DIM, max_position_embeddings=256, max_model_len=max_model_len)


def test_default():
    result = frequencies()
    np.testing.assert_allclose(result.inv_freq, PLAIN, rtol=1e-6)
    assert result.inv_freq.dtype == np.float32
    assert result.attention_factor == 1.0


def test_only_a_share_of_the_head_rotates():
    result = frequencies(partial_rotary_factor=0.25)
    np.testing.assert_allclose(result.inv_freq, [10000 ** (-2 * i / 16) for i in range(8)], rtol=1e-6)


def test_linear_stretches_positions():
    np.testing.assert_allclose(frequencies(rope_type="linear", factor=4.0).inv_freq, PLAIN / 4, rtol=1e-6)


@pytest.mark.parametrize(("max_model_len", "stretch"), [(None, 1.0), (100, 1.0), (512, 2 * 2 - 1), (1024, 2 * 4 - 1)])
def test_dynamic_is_settled_by_the_longest_sequence(max_model_len, stretch):
    result = frequencies(max_model_len, rope_type="dynamic", factor=2.0)
    base = 10000 * stretch ** (DIM / (DIM - 2))
    np.testing.assert_allclose(result.inv_freq, [base ** (-2 * i / DIM) for i in range(DIM // 2)], rtol=2e-6)


def test_llama3_keeps_fast_pairs_and_slows_slow_ones():
    result = frequencies(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    for i, plain in enumerate(PLAIN):
        turns = 64 * plain / (2 * math.pi)  # within the trained length
        weight = min(max((turns - 1) / 3, 0), 1)
        assert result.inv_freq[i] == pytest.approx(plain * (weight + (1 - weight) / 8), rel=1e-5)
    assert result.inv_freq[0] == pytest.approx(1.0)
    assert result.inv_freq[-1] == pytest.approx(PLAIN[-1] / 8, rel=1e-5)


def test_yarn():
    result = frequencies(rope_type="yarn", factor=4.0)
    # Pairs that turn 32 times in 64 tokens would be below 0, those that turn once are pair 8.06, rounded up.
    ramp = np.clip(np.arange(DIM // 2) / 9, 0, 1)
    np.testing.assert_allclose(result.inv_freq, PLAIN * (1 - ramp) + PLAIN / 4 * ramp, rtol=1e-5)
    assert result.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_without_rounding():
    result = frequencies(rope_type="yarn", factor=4.0, truncate=False)
    end = DIM * math.log(64 / (2 * math.pi)) / (2 * math.log(10000))
    ramp = np.clip(np.arange(DIM // 2) / end, 0, 1)
    np.testing.assert_allclose(result.inv_freq, PLAIN * (1 - ramp) + PLAIN / 4 * ramp, rtol=1e-5)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"factor": None}, 0.1 * math.log(256 / 64) + 1),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"factor": 40.0, "mscale": 0.7}, 0.1 * math.log(40) + 1),
        ({"factor": 0.5}, 1.0),
        ({"factor": 4.0, "attention_factor": 1.5}, 1.5),
    ],
)
def test_yarn_attention_factor(parameters, expected):
    assert frequencies(rope_type="yarn", **parameters).attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(("max_model_len", "factor"), [(None, 3.0), (64, 2.0), (65, 3.0)])
def test_longrope_chooses_once(max_model_len, factor):
    long, short = (3.0,) * (DIM // 2), (2.0,) * (DIM // 2)
    result = frequencies(max_model_len, rope_type="longrope", long_factor=long, short_factor=short)
    np.testing.assert_allclose(result.inv_freq, PLAIN / factor, rtol=1e-6)
    assert result.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_longrope_needs_a_factor_a_pair():
    with pytest.raises(ValueError, match="needs 32 long and short factors, got 2"):
        frequencies(rope_type="longrope", long_factor=(1.0, 2.0), short_factor=(1.0, 2.0))


def test_phi3_keeps_the_trained_length_outside():
    outside = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "rope_theta": 1e4}
    scaling = {"type": "su", "long_factor": [1.5], "short_factor": [1.0]}
    rope = RopeParameters.from_hf(outside | {"rope_scaling": scaling})
    assert (rope.rope_type, rope.original_max_position_embeddings) == ("longrope", 4096)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "mrope"}, "rope_type must be one of default, .*, got 'mrope'"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "Unknown rope parameter 'mrope_section'"),
    ],
)
def test_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        RopeParameters.from_hf({"rope_parameters": parameters, "max_position_embeddings": 64})


def test_rotation_by_hand():
    table = RopeTable(jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 0.0]]))  # a quarter turn, and none
    x = jnp.array([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    np.testing.assert_allclose(apply_rope(x, table)[0, 0], [-3.0, 2.0, 1.0, 4.0, 5.0])
    np.testing.assert_allclose(apply_rope(x, table, interleaved=True)[0, 0], [-2.0, 1.0, 3.0, 4.0, 5.0])


def test_table_scales_by_the_attention_factor():
    table = rope_table(RopeFrequencies(np.array([0.5], np.float32), 2.0), jnp.array([0, 3]))
    np.testing.assert_allclose(table.cos[:, 0], [2.0, 2 * math.cos(1.5)], rtol=1e-6)
    np.testing.assert_allclose(table.sin[:, 0], [0.0, 2 * math.sin(1.5)], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "num_pairs"), [("bfloat16", 32), ("float32", 16), ("float32", 32)])
def test_swapping_by_a_product_rotates_alike(interleaved, dtype, num_pairs):
    """What TPUs do against what every other device does: the same up to the order of one addition."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (5, 3, 64)).astype(dtype)
    angles = jax.random.uniform(keys[1], (5, num_pairs), maxval=6.0)
    table = RopeTable(jnp.cos(angles) * 1.5, jnp.sin(angles) * 1.5)
    parts = _rotate_parts(x, table, interleaved=interleaved).astype(jnp.float32)
    swapped = _rotate_swapped(x, table, interleaved=interleaved).astype(jnp.float32)
    np.testing.assert_allclose(swapped, parts, rtol=1e-6 if dtype == "float32" else 2**-8, atol=1e-6)
    np.testing.assert_array_equal(swapped[..., 2 * num_pairs :], x[..., 2 * num_pairs :].astype(jnp.float32))
