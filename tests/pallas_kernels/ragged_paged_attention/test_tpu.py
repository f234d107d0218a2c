"""The TPU kernels in interpret mode against the float32 reference: ragged rows, NaN wherever nothing is."""

import faulthandler
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import AttentionMetadata, backends, reference, tpu, tpu_tuning
from pallas_kernels.ragged_paged_attention.quantisation import QuantisedPool, is_quantised, quantise
from pallas_kernels.ragged_paged_attention.tpu_tuning import Config

NUM_TOKENS, NUM_ROWS, NUM_PAGES, NUM_LAYERS, LAYER = 64, 6, 64, 2, 1


@pytest.fixture(autouse=True)
def _time_out():
    """A semaphore that nobody signals would hang the run for ever; this ends it with a traceback."""
    faulthandler.dump_traceback_later(540, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Case(NamedTuple):
    """What a kernel is compiled for; everything else is data."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    is_windowed: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    query_tokens: int = 32
    num_cores: int = 1
    value_dim: int | None = None

    @property
    def width(self) -> int:
        """Pages a row can have."""
        return 160 // self.page_size

    def config(self) -> Config:
        """Blocks so small that rows of a few pages take every path."""
        block_pages = 32 // self.page_size or 1
        return Config(
            page_size=self.page_size, decode_fetch_pages=2 * block_pages, decode_block_pages=block_pages,
            decode_rows=2, mixed_fetch_pages=2 * block_pages, mixed_block_pages=block_pages,
            query_tokens=self.query_tokens, narrow_tokens=16, num_slots=3, vmem_limit_bytes=1 << 24,
            write_tokens=32 if is_quantised(self.dtype) else 16,
        )  # fmt: skip


SINKS = Case(2, 1, 96, 80, "float32", has_sinks=True)
QUICK = [
    Case(4, 2, 64, 16, "float32", is_windowed=True, softcap=5.0, has_sinks=True),
    Case(6, 2, 80, 16, "bfloat16", is_windowed=True, num_cores=2),
    Case(4, 2, 64, 32, "int8", is_windowed=True, softcap=5.0, has_sinks=True, num_cores=2),
    Case(16, 1, 72, 32, "bfloat16", query_tokens=16, value_dim=64),
]
CASES = [
    *QUICK,
    SINKS,
    Case(4, 4, 128, 16, "float32", num_cores=2),
    Case(3, 1, 256, 32, "bfloat16", query_tokens=16),
    Case(2, 1, 64, 160, "int8", query_tokens=16),
    Case(6, 3, 96, 32, "float8_e4m3fn", is_windowed=True, has_sinks=True),
    Case(4, 1, 160, 16, "float32", value_dim=128),
]


def make_batch(case: Case, q_lens: list[int], kv_lens: list[int], seed: int):
    """Queries, keys, values, both pools and metadata; NaN in padding and in every page row without a token."""
    rng = np.random.default_rng(seed)
    order = np.argsort([n > 1 for n in q_lens], kind="stable")
    q_lens, kv_lens = np.array(q_lens, int)[order], np.array(kv_lens, int)[order]
    padding = np.zeros(NUM_ROWS - len(q_lens), int)
    q_lens, kv_lens = np.concatenate([q_lens, padding]), np.concatenate([kv_lens, padding])
    table = rng.permutation(NUM_PAGES)[: NUM_ROWS * case.width].reshape(NUM_ROWS, case.width)
    metadata = AttentionMetadata(
        *(jnp.asarray(x, jnp.int32) for x in (np.cumsum([0, *q_lens]), kv_lens, table, np.sum(q_lens == 1)))
    )
    num_used, heads = q_lens.sum(), (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    q, k, v = (rng.normal(size=(NUM_TOKENS, n, case.head_dim)).astype(np.float32) for n in heads)
    for x in (q, k, v):
        x[num_used:] = np.nan
    planes = 1 if case.value_dim else 2
    shape = (NUM_LAYERS, NUM_PAGES, case.page_size, planes, case.num_kv_heads, case.head_dim)
    pool = np.full(shape, np.nan, np.float32)
    for row, num_cached in enumerate(kv_lens - q_lens):
        positions = np.arange(num_cached)
        pages, offsets = table[row][positions // case.page_size], positions % case.page_size
        pool[:, pages, offsets] = rng.normal(size=(NUM_LAYERS, num_cached, *pool.shape[3:]))
    sinks = jnp.asarray(rng.normal(size=case.num_heads), jnp.float32) if case.has_sinks else None
    if not is_quantised(case.dtype):
        q, k, v, pool = (jnp.asarray(x, case.dtype) for x in (q, k, v, pool))
        return q, k, None if case.value_dim else v, pool, metadata, sinks
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    # Scales are NaN where no token is, and so are float8s; an int8 cannot be.
    values, scales = quantise(jnp.nan_to_num(jnp.asarray(pool), nan=1.0), case.dtype)
    has_token = jnp.isfinite(jnp.asarray(pool[..., 0]))
    garbage = jnp.asarray(127 if case.dtype == "int8" else np.nan, case.dtype)
    values = jnp.where(has_token[..., None], values, garbage)
    return q, k, v, QuantisedPool(values, jnp.where(has_token, scales, np.nan)), metadata, sinks


def to_tpu(pool: jax.Array | QuantisedPool) -> jax.Array | QuantisedPool:
    """The reference's pool as the TPU backend lays it out; lanes that hold nothing are NaN where the token is."""
    return tpu.pack_pages(reference.unpack_pages(pool, 0))


def of_tpu(pool: jax.Array | QuantisedPool, head_dim: int) -> jax.Array | QuantisedPool:
    """The TPU backend's pool as the reference lays it out."""
    return reference.pack_pages(tpu.unpack_pages(pool, head_dim))


@lru_cache
def kernel(case: Case, interpret=True):
    """The compiled kernels of a case."""

    def attend(q, k, v, pool, layer, metadata, window, sinks):
        return tpu.ragged_paged_attention(
            q, k, v, to_tpu(pool), layer, metadata, scale=0.3, window=window, softcap=case.softcap, sinks=sinks,
            value_dim=case.value_dim, interpret=interpret, config=case.config(),
        )  # fmt: skip

    # Compiling is most of the time of these tests, and running the least.
    return jax.jit(attend, compiler_options={"xla_backend_optimization_level": 0})


oracle = jax.jit(partial(reference.ragged_paged_attention, scale=0.3), static_argnames=("softcap", "value_dim"))


def check(case: Case, q_lens: list[int], kv_lens: list[int], window: int | None, seed: int, interpret=True) -> None:
    """The kernels agree with the reference on results, and on every page row that holds a token."""
    q, k, v, pool, metadata, sinks = make_batch(case, q_lens, kv_lens, seed)
    window = jnp.int32(window) if case.is_windowed else None
    exact = [None if x is None else x.astype(jnp.float32) for x in (q, k, v)]
    given = pool if isinstance(pool, QuantisedPool) else pool.astype(jnp.float32)
    options = {"window": window, "softcap": case.softcap, "sinks": sinks, "value_dim": case.value_dim}
    wanted, wanted_pool = oracle(*exact, given, LAYER, metadata, **options)
    out, out_pool = kernel(case, interpret)(q, k, v, pool, jnp.int32(LAYER), metadata, window, sinks)
    num_used = int(metadata.cu_q_lens[-1])
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all()
    # bfloat16: a probability and a result are each rounded once, to 8 bits, and values reach 4 or so.
    tolerance = 1e-5 if case.dtype == "float32" else 3e-2
    np.testing.assert_allclose(out[:num_used], np.asarray(wanted)[:num_used], rtol=tolerance, atol=tolerance)

    has_token = np.zeros((NUM_PAGES, case.page_size), bool)
    for row, kv_len in enumerate(np.asarray(metadata.kv_lens)):
        positions = np.arange(kv_len)
        pages = np.asarray(metadata.page_table)[row][positions // case.page_size]
        has_token[pages, positions % case.page_size] = True
    out_pool = of_tpu(out_pool, case.head_dim)
    for found, expected in zip(jax.tree.leaves(out_pool), jax.tree.leaves(wanted_pool), strict=True):
        expected = np.asarray(expected.astype(found.dtype), np.float32)[:, has_token]
        np.testing.assert_array_equal(np.asarray(found, np.float32)[:, has_token], expected)


@st.composite
def rows(draw, page_size: int) -> tuple[list[int], list[int]]:
    """Query and cached lengths of up to NUM_ROWS rows, often at the edges of pages."""
    limit, left, q_lens, kv_lens = 160, NUM_TOKENS, [], []
    for _ in range(draw(st.integers(0, NUM_ROWS))):
        if left == 0:
            break
        q_len = draw(st.one_of(st.just(1), st.integers(1, left)))
        edges = [n for n in range(page_size, limit + 1, page_size) if n >= q_len]
        near = [n for edge in edges for n in (edge - 1, edge, edge + 1) if q_len <= n <= limit]
        lengths = st.integers(q_len, limit)
        q_lens.append(q_len)
        kv_lens.append(draw(st.one_of(st.sampled_from(near), lengths) if near else lengths))
        left -= q_len
    return q_lens, kv_lens


def slow_unless_quick(case: Case):
    """Each case takes some 15 seconds: a few by default, all with `-m slow`."""
    return pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("case", [slow_unless_quick(case) for case in CASES])
def test_agrees_with_the_reference(case, monkeypatch):
    monkeypatch.setattr(tpu_tuning, "INTERPRETED", tpu_tuning.INTERPRETED._replace(num_cores=case.num_cores))

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(lengths=rows(case.page_size), window=st.sampled_from([0, 1, 15, 16, 40, 1000]), seed=st.integers(0, 99))
    def agree(lengths, window, seed):
        check(case, *lengths, window, seed)

    agree()
    check(case, [1, 1, 1, 2, 40, 19], [1, 160, 33, 160, 150, 19], 20, 0)
    check(case, [64], [64], 0, 1)


def test_hand_worked_example():
    """A query of zeros weighs all it sees equally: the results are means of values, the newest included."""
    case = SINKS
    q, k, v, pool, metadata, _ = make_batch(case, [1, 3], [3, 3], 0)
    q, k = jnp.zeros_like(q), jnp.zeros_like(k)
    v = v.at[:4].set(jnp.asarray([6.0, 10.0, 20.0, 60.0])[:, None, None])
    first_page = metadata.page_table[0, 0]
    pool = pool.at[LAYER, first_page, :2, 0].set(0.0)
    pool = pool.at[LAYER, first_page, :2, 1].set(jnp.asarray([1.0, 2.0])[:, None, None])
    out, _ = kernel(case)(q, k, v, pool, jnp.int32(LAYER), metadata, None, jnp.full(2, -1e9))
    np.testing.assert_allclose(out[:4, 0, 0], [(1 + 2 + 6) / 3, 10, (10 + 20) / 2, (10 + 20 + 60) / 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("on_wait", "bfloat16"),
        pytest.param("eager", "bfloat16", marks=pytest.mark.slow),
        pytest.param("on_wait", "int8", marks=pytest.mark.slow),
    ],
)
def test_no_races_with_simulated_dmas(mode, dtype, capsys):
    """Copies done at once and copies done as late as possible give the same, and no access is unordered."""
    case = Case(2, 1, 64, 32 if dtype == "int8" else 16, dtype, is_windowed=True, query_tokens=16)
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    check(case, [1, 1, 1, 9, 30], [1, 160, 96, 100, 30], 70, 0, interpret=params)
    assert "RACE" not in capsys.readouterr().out.upper()


def test_is_listed_once_each():
    assert [name for name in backends() if name.startswith(("tpu", "interpret"))] == ["interpret", "tpu"]


def test_needs_a_tpu_unless_interpreted():
    case = CASES[0]
    q, k, v, pool, metadata, _ = make_batch(case, [1], [1], 0)
    with pytest.raises(ValueError, match="TPU device kind"):
        tpu.ragged_paged_attention(q, k, v, to_tpu(pool), 0, metadata, scale=1.0, window=None, softcap=None, sinks=None)
