"""Rows split at the borders of chunks, against the same split done in Python; Llama 4's golden shows the attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layers.chunked_attention import split_rows
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata

CHUNK, PAGE_SIZE, NUM_TOKENS, NUM_ROWS, WIDTH = 8, 4, 24, 4, 12

split = jax.jit(split_rows, static_argnums=(1, 2, 3))


def batch(decode_lens, prefill_rows):
    """One-token rows of these lengths, then rows of (cached tokens, query tokens), then padding rows."""
    rows = [(kv_len - 1, 1) for kv_len in decode_lens] + list(prefill_rows)
    rows += [(0, 0)] * (NUM_ROWS - len(rows))
    q_lens = np.array([num for _, num in rows])
    return rows, AttentionMetadata(
        jnp.asarray([0, *np.cumsum(q_lens)], jnp.int32),
        jnp.asarray([cached + num for cached, num in rows], jnp.int32),
        jnp.arange(NUM_ROWS * WIDTH, dtype=jnp.int32).reshape(NUM_ROWS, WIDTH),
        jnp.int32(len(decode_lens)),
    )


def expected_pieces(rows):
    """(query tokens, tokens of the chunk so far, first page of the chunk) of every row of a chunk."""
    pieces = []
    for row, (cached, num) in enumerate(rows):
        for start in range(cached // CHUNK * CHUNK, cached + num, CHUNK):
            stop = min(start + CHUNK, cached + num)
            if num:
                pieces.append((stop - max(start, cached), stop - start, row * WIDTH + start // PAGE_SIZE))
    return pieces


@settings(max_examples=60, deadline=None)
@given(
    decode_lens=st.lists(st.integers(1, 40), max_size=2),
    prefill_rows=st.lists(st.tuples(st.integers(0, 25), st.integers(2, 11)), max_size=2),
)
def test_every_chunk_has_its_row(decode_lens, prefill_rows):
    rows, metadata = batch(decode_lens, prefill_rows)
    result = split(metadata, NUM_TOKENS, CHUNK, PAGE_SIZE)
    q_lens = np.diff(result.cu_q_lens)
    pieces = expected_pieces(rows)
    found = list(zip(q_lens, result.kv_lens, result.page_table[:, 0], strict=True))
    assert found[: len(pieces)] == pieces
    assert all(q_len == kv_len == 0 for q_len, kv_len, _ in found[len(pieces) :])
    assert int(result.num_decode_rows) == len(decode_lens)
    assert result.page_table.shape[1] == CHUNK // PAGE_SIZE
    used = -(-np.asarray(result.kv_lens) // PAGE_SIZE)
    for pages, count in zip(np.asarray(result.page_table), used, strict=True):
        np.testing.assert_array_equal(pages[:count], pages[0] + np.arange(count))


def test_as_many_rows_as_can_be_needed():
    # Every row of two tokens lies across a border.
    _, metadata = batch([], [(7, 2)] * 4)
    result = split(metadata, 8, CHUNK, PAGE_SIZE)
    assert np.count_nonzero(np.diff(result.cu_q_lens)) == 8


def test_chunk_must_be_whole_pages():
    _, metadata = batch([], [])
    with pytest.raises(ValueError, match="page size must divide a chunk of 8 tokens, got 3"):
        split_rows(metadata, NUM_TOKENS, CHUNK, 3)
