"""Log-probabilities as the engine core sends them, turned into what callers read."""

import codecs

from paxserve.engine.token_table import TokenTable
from paxserve.messages import TokenLogprobs
from paxserve.outputs import Logprob


class LogprobReader:
    """Reads the positions of one sequence in order, spelling each token as what it adds to the text there.

    A token that is only the beginning of a character adds nothing yet, the one that completes it adds the whole
    character: so the chosen tokens' strings join to the text. `token_bytes` tells the bytes themselves.
    """

    def __init__(self, table: TokenTable | None) -> None:
        self._table = table
        self._pending = b""

    def skip(self, token_id: int) -> None:
        """Go past a position that has no log-probabilities."""
        if self._table is not None:
            self._pending = _extend(self._pending, self._table.token_bytes(token_id))[1]

    def read(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The position's log-probabilities by token id: the chosen token first, then the most likely ones."""
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        if self._table is None:
            texts: list[str | None] = [None] * len(ranks)
        else:
            spelled = [_extend(self._pending, self._table.token_bytes(token_id)) for token_id in entry.token_ids]
            texts = [text for text, _ in spelled]
            self._pending = spelled[0][1]
        position: dict[int, Logprob] = {}
        for token_id, value, rank, text in zip(entry.token_ids, entry.logprobs, ranks, texts, strict=True):
            position.setdefault(token_id, Logprob(value, rank, text))
        return position


def _extend(pending: bytes, added: bytes) -> tuple[str, bytes]:
    """The text that `added` brings after `pending`, and the bytes that wait for the rest of their character."""
    if not pending and added.isascii():
        return added.decode("ascii"), b""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(pending + added)
    return text, decoder.getstate()[0]
