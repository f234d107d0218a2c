"""The portable form against the oracle, the oracle against numbers worked out by hand, and padding full of NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_attention import backends, ragged_attention


def batch(lengths, num_padding, *, heads=4, kv_heads=2, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    q, k, v = (
        rng.normal(size=(total + num_padding, n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads)
    )
    for x in (q, k, v):
        x[total:] = np.nan
    cu_lens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(cu_lens)


def test_the_backends():
    assert backends() == ["reference", "xla"]


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_by_hand(backend):
    """Two rows of two tokens; keys of zero weigh all alike, so that an output is the mean of what is seen."""
    q = jnp.ones((5, 1, 1))
    k = jnp.zeros((5, 1, 1))
    v = jnp.asarray([1.0, 3.0, 10.0, 20.0, jnp.nan]).reshape(5, 1, 1)
    cu_lens = jnp.asarray([0, 2, 4], jnp.int32)

    def run(**options):
        options = {"is_causal": False, **options}
        return ragged_attention(q, k, v, cu_lens, scale=1.0, backend=backend, **options).ravel().tolist()

    assert run() == [2, 2, 15, 15, 0]
    assert run(is_causal=True) == [1, 2, 10, 15, 0]
    assert run(window=1) == [1, 3, 10, 20, 0]
    # A sink of logit 0 weighs as much as one token and brings nothing.
    assert run(is_causal=True, sinks=jnp.zeros(1)) == pytest.approx([0.5, 4 / 3, 5, 10, 0])


OPTIONS = (
    {"is_causal": True},
    {"is_causal": False, "softcap": 3.0},
    {"is_causal": False, "window": 5},
    {"is_causal": True, "window": 65, "sinks": jnp.asarray([0.5, -1.0, 2.0, 0.0])},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_tiles_equal_the_reference(options):
    # One program for all lengths, which say only where the rows lie: compiling takes longest.
    run = jax.jit(partial(ragged_attention, scale=0.3, **options), static_argnames="backend")

    @settings(max_examples=12, deadline=None)
    @given(lengths=st.lists(st.sampled_from([0, 1, 2, 17, 63, 64, 65]), min_size=3, max_size=3))
    def check(lengths):
        q, k, v, cu_lens = batch(lengths, 200 - sum(lengths))
        both = [run(q, k, v, cu_lens, backend=backend) for backend in ("xla", "reference")]
        np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-5)
        assert not np.asarray(both[0])[sum(lengths) :].any()

    check()


def test_a_window_of_zero_in_an_array_is_none():
    q, k, v, cu_lens = batch([90], 6)
    whole = ragged_attention(q, k, v, cu_lens, scale=1.0, is_causal=False)
    np.testing.assert_array_equal(
        ragged_attention(q, k, v, cu_lens, scale=1.0, is_causal=False, window=jnp.int32(0)), whole
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.zeros((5, 2, 8)), "v": jnp.zeros((5, 2, 8))}, "must agree"),
        ({"k": jnp.zeros((4, 3, 8)), "v": jnp.zeros((4, 3, 8))}, "multiple of kv heads"),
        ({"cu_lens": jnp.zeros(3)}, "cu_lens must be"),
        ({"softcap": 0.0}, "softcap"),
        ({"sinks": jnp.zeros(2)}, "sinks"),
        ({"backend": "none"}, "backend must be one of"),
    ],
)
def test_mistakes(change, message):
    q, k, v, cu_lens = batch([4], 0)
    arguments = {"q": q, "k": k, "v": v, "cu_lens": cu_lens, "scale": 1.0, "is_causal": False} | change
    with pytest.raises(ValueError, match=message):
        ragged_attention(**arguments)
