"""Attention within chunks of a sequence: a token sees its own chunk, up to itself (Llama 4).

A row that spans chunks becomes a row for each: of a chunk's tokens, over the chunk's pages. Paged attention itself is
none the wiser.
"""

import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata


def split_rows(metadata: AttentionMetadata, num_tokens: int, chunk: int, page_size: int) -> AttentionMetadata:
    """The batch of `num_tokens` query tokens with a row for each chunk of `chunk` tokens that a row has queries in.

    Decode rows stay first, as they have one token. Raises `ValueError` unless a chunk is a whole number of pages.
    """
    if chunk % page_size:
        raise ValueError(f"page size must divide a chunk of {chunk} tokens, got {page_size}.")
    cu_q_lens, kv_lens, page_table, num_decode_rows = metadata
    num_rows, width = page_table.shape
    # A row of two tokens or more may cross one border, and one more every `chunk` tokens.
    most = num_rows + min(num_rows, num_tokens // 2) + num_tokens // chunk

    # 1. Rows and the chunks that they have queries in.
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    firsts = (kv_lens - q_lens) // chunk
    counts = jnp.where(q_lens > 0, (kv_lens - 1) // chunk - firsts + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)

    # 2. Pieces: of which row, which chunk, how much of it.
    pieces = jnp.arange(most, dtype=jnp.int32)
    rows = jnp.minimum(jnp.sum(ends[None, :] <= pieces[:, None], axis=1, dtype=jnp.int32), num_rows - 1)
    is_real = pieces < ends[-1]
    starts = (firsts[rows] + pieces - (ends - counts)[rows]) * chunk
    stops = jnp.minimum(starts + chunk, kv_lens[rows])
    first_queries = jnp.maximum(starts, (kv_lens - q_lens)[rows])
    new_q_lens = jnp.where(is_real, stops - first_queries, 0)
    new_cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new_q_lens, dtype=jnp.int32)])

    # 3. The chunk's own pages.
    columns = jnp.arange(min(width, chunk // page_size), dtype=jnp.int32)
    columns = jnp.clip(starts[:, None] // page_size + columns[None, :], 0, width - 1)
    return AttentionMetadata(
        new_cu_q_lens, jnp.where(is_real, stops - starts, 0), page_table[rows[:, None], columns], num_decode_rows
    )
