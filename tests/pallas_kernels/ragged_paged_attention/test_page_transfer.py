"""Pages copied within a pool and taken from one backend's pool to another's, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import (
    AttentionMetadata,
    PageContent,
    copy_pages,
    export_pages,
    import_pages,
    make_pool,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.quantisation import is_quantised

BACKENDS = ("reference", "xla", "interpret")
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
SIZES = {"num_layers": 3, "num_pages": 6, "page_size": 32, "num_kv_heads": 3}


def random_content(dtype: str, head_dim: int, num_pages: int) -> PageContent:
    rng = np.random.default_rng(0)
    shape = (num_pages, 3, 2, 32, 3, head_dim)
    values = jnp.asarray(rng.integers(-127, 127, shape), jnp.int8)
    if dtype != "int8":
        values = jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)
    scales = jnp.asarray(rng.uniform(size=shape[:-1]), jnp.float32) if is_quantised(dtype) else None
    return PageContent(values, scales)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("head_dim", [16, 64, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_content_survives_every_backend_in_turn(dtype, head_dim):
    content = random_content(dtype, head_dim, 3)
    pages = jnp.array([4, 0, 1])
    sent = content
    for backend in (*BACKENDS, *BACKENDS[::-1]):
        pool = make_pool(backend, **SIZES, head_dim=head_dim, dtype=dtype)
        pool = import_pages(pool, pages, sent, backend)
        sent = jax.tree.map(np.asarray, export_pages(pool, pages, backend, head_dim=head_dim))
        assert sent.values.shape == (3, 3, 2, 32, 3, head_dim)
        rest = export_pages(pool, jnp.array([2, 3, 5]), backend, head_dim=head_dim)
        assert not np.asarray(rest.values, np.float32).any()
    assert_same(jax.tree.map(jnp.asarray, sent), content)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_out_of_range_is_not_imported(backend):
    content = random_content("int8", 64, 3)
    pool = make_pool(backend, **SIZES, head_dim=64, dtype="int8")
    pool = import_pages(pool, jnp.array([6, 5, -1]), content, backend)
    found = export_pages(pool, jnp.arange(6), backend, head_dim=64)
    np.testing.assert_array_equal(found.values[5], content.values[1])
    assert not np.asarray(found.values[:5]).any()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("xla", "float32"), ("xla", "float8_e4m3fn"), ("interpret", "float32"), ("interpret", "int8")],
)
def test_attention_over_pages_of_another_backend(backend, dtype):
    """A prompt that the reference computed is decoded by another backend, from its pages."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(40, n, 64)), jnp.float32) for n in (6, 3, 3))
    table = jnp.array([[3, 1]])
    prompt = AttentionMetadata(jnp.array([0, 39]), jnp.array([39]), table, jnp.int32(0))
    last = AttentionMetadata(jnp.array([0, 1]), jnp.array([40]), table, jnp.int32(1))
    options = {"scale": 0.125, "layer": 1}
    pools = {b: make_pool(b, **SIZES, head_dim=64, dtype=dtype) for b in ("reference", backend)}
    _, pool = ragged_paged_attention(
        q[:39], k[:39], v[:39], pools["reference"], metadata=prompt, backend="reference", **options
    )
    content = export_pages(pool, jnp.array([3, 1]), "reference", head_dim=64)
    expected, _ = ragged_paged_attention(q[39:], k[39:], v[39:], pool, metadata=last, backend="reference", **options)
    other = import_pages(pools[backend], jnp.array([3, 1]), content, backend)
    out, _ = ragged_paged_attention(q[39:], k[39:], v[39:], other, metadata=last, backend=backend, **options)
    tolerance = 1e-5 if dtype == "float32" or backend == "xla" else 2e-2
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_every_layer_and_drops_what_is_out_of_range(backend, dtype):
    content = random_content(dtype, 64, 6)
    pool = import_pages(make_pool(backend, **SIZES, head_dim=64, dtype=dtype), jnp.arange(6), content, backend)
    copied = jax.jit(copy_pages, static_argnums=3)(pool, jnp.array([4, 1, 0, 9]), jnp.array([0, 3, 6, 77]), backend)
    expected = jax.tree.map(lambda x: x.at[jnp.array([0, 3])].set(x[jnp.array([4, 1])]), content)
    assert_same(export_pages(copied, jnp.arange(6), backend, head_dim=64), expected)


def test_content_of_other_pools_is_refused():
    pool = make_pool("xla", **SIZES, head_dim=64, dtype="int8")
    with pytest.raises(ValueError, match="must be of pages like the pool's"):
        import_pages(pool, jnp.arange(2), random_content("float32", 64, 2), "xla")
    with pytest.raises(ValueError, match="must be of pages like the pool's"):
        import_pages(pool, jnp.arange(2), random_content("int8", 32, 2), "xla")
    with pytest.raises(ValueError, match="one for each of 2"):
        import_pages(pool, jnp.arange(3), random_content("int8", 64, 2), "xla")
