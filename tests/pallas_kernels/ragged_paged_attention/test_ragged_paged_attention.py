"""The plain backends against a dense softmax in float64: ragged rows over two steps, NaN wherever no token is."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import (
    AttentionMetadata,
    backends,
    export_pages,
    import_pages,
    make_pool,
    pool_bytes_per_page,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.quantisation import LARGEST, QuantisedPool, is_quantised

PLAIN = ("reference", "xla")
NUM_ROWS, NUM_LAYERS, LAYER = 5, 2, 1


class Case(NamedTuple):
    """What a program is compiled for; everything else is data."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_tokens: int
    """T of both steps, padding included."""
    longest: int
    """Most tokens of a row."""
    window: int | None = None
    is_window_traced: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    dtype: str = "float32"
    value_dim: int | None = None
    """Of latent attention: values are so many first channels of the keys, and are not cached."""

    @property
    def width(self) -> int:
        """Columns of the page table."""
        return -(-self.longest // self.page_size) + 1

    @property
    def num_pages(self) -> int:
        """Pages of the pool: enough for all rows, and some to spare."""
        return NUM_ROWS * self.width + 3


CASES = [
    Case(6, 2, 64, 16, 200, 190),
    Case(9, 3, 64, 16, 80, 75, window=20, is_window_traced=True, has_sinks=True),
    Case(4, 1, 16, 1, 40, 38, softcap=3.0),
    Case(2, 2, 256, 4, 12, 11, window=3, softcap=20.0, has_sinks=True),
    Case(8, 2, 32, 4, 8, 7, window=2, is_window_traced=True),
    Case(4, 2, 96, 16, 7, 7, has_sinks=True),
    Case(6, 2, 64, 16, 200, 190, window=40, softcap=20.0, has_sinks=True, dtype="int8"),
    Case(4, 1, 32, 4, 40, 38, dtype="float8_e4m3fn"),
    Case(4, 2, 96, 8, 8, 8, window=3, is_window_traced=True, dtype="int8"),
    Case(8, 1, 40, 16, 80, 75, value_dim=32),
    Case(16, 1, 24, 4, 8, 8, value_dim=16),
    Case(4, 1, 40, 4, 40, 38, dtype="int8", value_dim=32),
]


class Rows(NamedTuple):
    """Whole sequences, and how many of their tokens each of two steps computes."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    tables: np.ndarray
    sinks: np.ndarray | None
    first_lens: list[int]
    second_lens: list[int]


@cache
def program(case: Case, backend: str) -> Any:
    """The jitted step of a case."""

    def step(q, k, v, pool, metadata, window, sinks):
        v = v if case.value_dim is None else None
        return ragged_paged_attention(
            q, k, v, pool, LAYER, metadata, scale=case.head_dim**-0.5, softcap=case.softcap, sinks=sinks,
            window=window if case.is_window_traced else case.window, value_dim=case.value_dim, backend=backend,
        )  # fmt: skip

    return jax.jit(step)


def make_rows(case: Case, lens: list[tuple[int, int]], seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    tensors = [[rng.normal(size=(a + b, n, case.head_dim)).astype(np.float32) for a, b in lens] for n in heads]
    if is_quantised(case.dtype):
        tensors[1:] = [[representable(x, case.dtype, rng) for x in rows] for rows in tensors[1:]]
    if case.value_dim is not None:
        tensors[2] = [k[..., : case.value_dim] for k in tensors[1]]
    tables = rng.permutation(case.num_pages)[: NUM_ROWS * case.width].reshape(NUM_ROWS, case.width)
    sinks = rng.normal(size=case.num_heads).astype(np.float32) if case.has_sinks else None
    return Rows(*tensors, tables, sinks, [a for a, _ in lens], [b for _, b in lens])


def representable(x: np.ndarray, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Numbers like `x` that quantising does not change: what rounds which way is another test's."""
    scales = 2.0 ** rng.integers(-3, 0, x.shape[:-1])[..., None] / (32 if dtype == "int8" else 128)
    values = np.clip(x / scales, -LARGEST[dtype], LARGEST[dtype])
    values = np.round(values) if dtype == "int8" else values.astype(dtype).astype(np.float32)
    np.put_along_axis(values, np.argmax(np.abs(values), axis=-1)[..., None], LARGEST[dtype], axis=-1)
    return (values * scales).astype(np.float32)


def run_step(case: Case, backend: str, rows: Rows, pool: Any, starts: list[int], lens: list[int], poison: float):
    """Outputs by row and the new pool; rows are packed as the contract says, padding holds `poison`."""
    order = sorted((r for r in range(len(lens)) if lens[r]), key=lambda r: lens[r] > 1)
    packed = [np.full((case.num_tokens, *x[0].shape[1:]), poison, np.float32) for x in (rows.q, rows.k, rows.v)]
    cu_q_lens, kv_lens = np.zeros(NUM_ROWS + 1, np.int32), np.zeros(NUM_ROWS, np.int32)
    table = np.full((NUM_ROWS, case.width), case.num_pages - 1, np.int32)
    for i, r in enumerate(order):
        begin, end = cu_q_lens[i], cu_q_lens[i] + lens[r]
        for target, source in zip(packed, (rows.q, rows.k, rows.v), strict=True):
            target[begin:end] = source[r][starts[r] : starts[r] + lens[r]]
        cu_q_lens[i + 1], kv_lens[i], table[i] = end, starts[r] + lens[r], rows.tables[r]
    cu_q_lens[len(order) + 1 :] = cu_q_lens[len(order)]
    num_decode = np.int32(sum(lens[r] == 1 for r in order))
    metadata = AttentionMetadata(*map(jnp.asarray, (cu_q_lens, kv_lens, table, num_decode)))
    window = None if case.window is None else jnp.int32(case.window)
    out, pool = program(case, backend)(*packed, pool, metadata, window, rows.sinks)
    out = np.asarray(out)
    assert np.isfinite(out).all()
    return {r: out[cu_q_lens[i] : cu_q_lens[i + 1]] for i, r in enumerate(order)}, pool


def filled(leaf: jax.Array, poison: float) -> jax.Array:
    """Poison everywhere; where 8 bits are all there is, the largest int8, which is also a NaN of float8_e4m3fn."""
    return jnp.full_like(leaf, 127 if jnp.issubdtype(leaf.dtype, jnp.integer) else poison)


def run(case: Case, backend: str, rows: Rows, poison: float):
    """Outputs of the second step, and the pool after it."""
    pool = make_pool(
        backend, num_layers=NUM_LAYERS, num_pages=case.num_pages, page_size=case.page_size,
        num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, dtype=case.dtype,
        is_latent=case.value_dim is not None,
    )  # fmt: skip
    pool = jax.tree.map(lambda x: filled(x, poison), pool)
    _, pool = run_step(case, backend, rows, pool, [0] * len(rows.q), rows.first_lens, poison)
    return run_step(case, backend, rows, pool, rows.first_lens, rows.second_lens, poison)


def dense(case: Case, rows: Rows, r: int) -> np.ndarray:
    """Attention of row r's second step, by the book."""
    groups = case.num_heads // case.num_kv_heads
    k, v = (np.repeat(x[r].astype(np.float64), groups, axis=1) for x in (rows.k, rows.v))
    queries, positions = rows.q[r].astype(np.float64), np.arange(len(k))
    out = []
    for p in range(rows.first_lens[r], len(k)):
        logits = case.head_dim**-0.5 * np.einsum("nh,snh->ns", queries[p], k)
        if case.softcap:
            logits = case.softcap * np.tanh(logits / case.softcap)
        seen = (positions <= p) & (positions > p - (case.window or len(k)))
        weights = np.where(seen, np.exp(logits), 0.0)
        total = weights.sum(axis=1) + (0.0 if rows.sinks is None else np.exp(rows.sinks.astype(np.float64)))
        out.append(np.einsum("ns,snh->nh", weights / total[:, None], v))
    return np.array(out)


def draw_lens(case: Case, data: st.DataObject) -> list[tuple[int, int]]:
    """(cached, new) tokens of each row that fit T in both steps; many at the edges of pages."""
    lens, left = [], [case.num_tokens, case.num_tokens]
    near_page = st.integers(0, 3).map(lambda n: n * case.page_size).flatmap(lambda n: st.integers(n - 1, n + 1))
    for _ in range(data.draw(st.integers(1, NUM_ROWS))):
        cached = data.draw(near_page | st.integers(0, case.longest))
        new = data.draw(st.just(1) | near_page | st.integers(0, case.longest))
        cached = min(max(cached, 0), left[0], case.longest)
        new = min(max(new, 0), left[1], case.longest - cached)
        left = [left[0] - cached, left[1] - new]
        lens.append((cached, new))
    return lens


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_equals_a_dense_softmax(backend, case, data):
    rows = make_rows(case, draw_lens(case, data), data.draw(st.integers(0, 99)))
    outs, pool = run(case, backend, rows, np.nan)
    for r, out in outs.items():
        # Logits of size 4 are right to about 1e-6 in float32, and so are weights; an output near 0 keeps that error.
        np.testing.assert_allclose(out, dense(case, rows, r), rtol=2e-5, atol=5e-6)
    # Exactly the real tokens were written.
    poisoned = pool.scales if isinstance(pool, QuantisedPool) else pool
    num_tokens = sum(rows.first_lens) + sum(rows.second_lens)
    size = 1 if isinstance(pool, QuantisedPool) else case.head_dim
    assert int(jnp.isfinite(poisoned).sum()) == num_tokens * (1 if case.value_dim else 2) * case.num_kv_heads * size
    # What lies outside the rows does not even change a rounding.
    clean, _ = run(case, backend, rows, 0.5)
    for r, out in outs.items():
        np.testing.assert_array_equal(out, clean[r])


@pytest.mark.parametrize("backend", PLAIN)
def test_a_hand_worked_example(backend):
    # One query, ln 3 along the first key and across the second: weights 3/4 and 1/4 of the values 4 and 8.
    pool = make_pool(backend, num_layers=1, num_pages=3, page_size=1, num_kv_heads=1, head_dim=16, dtype="float32")
    unit = np.eye(1, 16, dtype=np.float32)[None]
    table = jnp.array([[2, 0]])
    first = AttentionMetadata(jnp.array([0, 1]), jnp.array([1]), table, jnp.int32(1))
    out, pool = ragged_paged_attention(unit, unit, 4 * unit, pool, 0, first, scale=1.0, backend=backend)
    np.testing.assert_allclose(out, 4 * unit, rtol=1e-6)
    second = first._replace(kv_lens=jnp.array([2]))
    query = np.log(3).astype(np.float32) * unit
    for sinks, expected in ((None, 5.0), (jnp.zeros(1), 4.0)):
        out, _ = ragged_paged_attention(
            query, 0 * unit, 8 * unit, pool, 0, second, scale=1.0, sinks=sinks, backend=backend
        )
        np.testing.assert_allclose(out, expected * unit, rtol=1e-6)
    # A window of one token sees only the second value.
    out, _ = ragged_paged_attention(query, 0 * unit, 8 * unit, pool, 0, second, scale=1.0, window=1, backend=backend)
    np.testing.assert_allclose(out, 8 * unit, rtol=1e-6)


@pytest.mark.parametrize("backend", PLAIN)
def test_bytes_per_page_are_what_a_pool_takes(backend):
    sizes = {"num_layers": 3, "page_size": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "bfloat16"}
    pool = make_pool(backend, num_pages=7, **sizes)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) == 7 * pool_bytes_per_page(backend, **sizes)
    assert pool_bytes_per_page(backend, **sizes) == 3 * 4 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", PLAIN)
def test_a_quantised_pool_is_a_quarter_of_float32_and_a_scale(backend, dtype):
    sizes = {"num_layers": 3, "page_size": 16, "num_kv_heads": 2, "head_dim": 128}
    pool = make_pool(backend, num_pages=7, **sizes, dtype=dtype)
    page_bytes = pool_bytes_per_page(backend, **sizes, dtype=dtype)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) == 7 * page_bytes
    assert page_bytes * 128 == (32 + 1) * pool_bytes_per_page(backend, **sizes, dtype="float32")
    assert page_bytes * 64 == (32 + 1) * pool_bytes_per_page(backend, **sizes, dtype="bfloat16")


def test_caller_mistakes_are_named():
    assert set(PLAIN) <= set(backends())
    sizes = {"num_layers": 1, "page_size": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    with pytest.raises(ValueError, match="backend must be one of .*reference.*, got 'cuda'"):
        make_pool("cuda", num_pages=2, **sizes)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        make_pool("xla", num_pages=0, **sizes)
    pool = make_pool("xla", num_pages=2, **sizes)
    metadata = AttentionMetadata(jnp.array([0, 1]), jnp.array([1]), jnp.array([[0]]), jnp.int32(1))
    q, k = jnp.zeros((1, 4, 16)), jnp.zeros((1, 2, 16))
    with pytest.raises(ValueError, match="multiple of kv heads, got 3"):
        ragged_paged_attention(q[:, :3], k, k, pool, 0, metadata, scale=1.0)
    with pytest.raises(ValueError, match="must agree"):
        ragged_paged_attention(q, k[..., :8], k, pool, 0, metadata, scale=1.0)
    with pytest.raises(ValueError, match="R \\+ 1"):
        ragged_paged_attention(q, k, k, pool, 0, metadata._replace(kv_lens=jnp.array([1, 2])), scale=1.0)
    with pytest.raises(ValueError, match="softcap must be above 0"):
        ragged_paged_attention(q, k, k, pool, 0, metadata, scale=1.0, softcap=0.0)
    with pytest.raises(ValueError, match="sinks must have one logit per query head"):
        ragged_paged_attention(q, k, k, pool, 0, metadata, scale=1.0, sinks=jnp.zeros(3))
    with pytest.raises(ValueError, match="metadata must hold integers"):
        ragged_paged_attention(q, k, k, pool, 0, metadata._replace(kv_lens=jnp.array([1.0])), scale=1.0)


@pytest.mark.parametrize("backend", PLAIN)
def test_latent_pages_are_half_of_others_and_move_like_them(backend):
    sizes = {"num_layers": 3, "page_size": 4, "num_kv_heads": 1, "head_dim": 576, "dtype": "bfloat16"}
    assert pool_bytes_per_page(backend, **sizes, is_latent=True) == 3 * 4 * 576 * 2
    pool = make_pool(backend, num_pages=5, **sizes, is_latent=True)
    pool = jax.tree.map(lambda leaf: jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), pool)
    content = export_pages(pool, jnp.array([4, 2]), backend, head_dim=576)
    assert content.values.shape == (2, 3, 1, 4, 1, 576)
    moved = import_pages(pool, jnp.array([1, 3]), content, backend)
    again = export_pages(moved, jnp.array([1, 3]), backend, head_dim=576)
    np.testing.assert_array_equal(again.values.astype(jnp.float32), content.values.astype(jnp.float32))


def test_latents_without_their_size_are_refused():
    pool = make_pool("xla", num_layers=1, num_pages=2, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32",
                     is_latent=True)  # fmt: skip
    metadata = AttentionMetadata(jnp.array([0, 1]), jnp.array([1]), jnp.array([[0]]), jnp.int32(1))
    q = jnp.ones((1, 2, 8))
    for value_dim in (None, 0, 9):
        with pytest.raises(ValueError, match=f"value_dim must be given instead of v, from 1 to 8, got {value_dim}"):
            ragged_paged_attention(q, q[:, :1], None, pool, 0, metadata, scale=1.0, value_dim=value_dim)
    with pytest.raises(ValueError, match="latent attention has one kv head, got 2"):
        ragged_paged_attention(q, q, None, pool, 0, metadata, scale=1.0, value_dim=4)
    with pytest.raises(ValueError, match="a latent pool has one kv head, got 2"):
        make_pool("xla", num_layers=1, num_pages=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float32",
                  is_latent=True)  # fmt: skip
