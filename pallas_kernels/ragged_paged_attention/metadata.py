"""Where the rows of a ragged batch are, and where their keys and values live."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class AttentionMetadata(NamedTuple):
    """A ragged batch of R rows over T query tokens, with page tables of P pages.

    Row r owns query tokens `cu_q_lens[r] : cu_q_lens[r + 1]`; they are the LAST tokens of its
    `kv_lens[r]` tokens, so query token i of the row sits at position
    `kv_lens[r] - q_len + i`. Rows are ordered: decode rows (one query token) first, then longer
    ones, then padding rows (no query token, `kv_lens` 0). Tokens from `cu_q_lens[R]` on are
    padding: nothing is written for them and their output is unspecified but finite.
    """

    cu_q_lens: Int32[Array, " R+1"]
    kv_lens: Int32[Array, " R"]
    """Cached tokens a row will have after this step, its own query tokens included."""
    page_table: Int32[Array, "R P"]
    """Pages of each row in order; entries past `ceil(kv_len / page_size)` are arbitrary but in range."""
    num_decode_rows: Int32[Array, ""]
    """Rows `[0, num_decode_rows)` have exactly one query token."""


class TokenPlaces(NamedTuple):
    """Which row each query token belongs to, and its position in the row's sequence."""

    rows: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    is_real: Bool[Array, " T"]
    """False for padding tokens, whose row and position mean nothing (but are in range)."""


def token_places(metadata: AttentionMetadata, num_tokens: int) -> TokenPlaces:
    """Row, position and reality of each of the batch's `num_tokens` query tokens."""
    cu_q_lens, kv_lens = metadata.cu_q_lens, metadata.kv_lens
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    # A token's row is the number of rows that end at or before it: a comparison with every row beats a search.
    rows = jnp.sum(cu_q_lens[None, 1:] <= tokens[:, None], axis=1, dtype=jnp.int32)
    rows = jnp.minimum(rows, kv_lens.shape[0] - 1)
    positions = kv_lens[rows] - cu_q_lens[rows + 1] + tokens
    is_real = tokens < cu_q_lens[-1]
    return TokenPlaces(rows, jnp.where(is_real, positions, 0), is_real)
