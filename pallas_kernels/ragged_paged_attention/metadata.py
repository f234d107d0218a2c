"""Where the rows of a ragged batch are, and where their keys and values live."""

from typing import NamedTuple

from jaxtyping import Array, Int32


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
