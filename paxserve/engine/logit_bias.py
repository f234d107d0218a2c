"""The row of numbers added to a request's logits: biases, and minus infinity for barred tokens.

The row changes only when a request passes `min_tokens` or when its output ends in the beginning of a
bad word, so it stays on the device and is sent again at those moments.
"""

import numpy as np

from paxserve.engine.request import Request

BiasState = tuple[bool, frozenset[int]]
"""What a row depends on besides the request: whether stop tokens are barred, and which bad words are due."""


def bias_state(request: Request, position: int) -> BiasState:
    """The state in which the token at output `position` is sampled."""
    output = request.output_token_ids
    due = frozenset(
        number
        for number, word in enumerate(request.params.bad_words_token_ids)
        if len(word) > 1 and output[-len(word) + 1 :] == word[:-1]
    )
    return position < request.params.min_tokens, due


def bias_row(request: Request, state: BiasState, vocab_size: int) -> np.ndarray:
    """The float32 row of length `vocab_size` for that state."""
    params = request.params
    bars_stops, due = state
    row = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        row[:] = -np.inf
        row[params.allowed_token_ids] = 0.0
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    barred = {word[-1] for number, word in enumerate(params.bad_words_token_ids) if len(word) == 1 or number in due}
    if bars_stops:
        barred |= request.stop_token_ids
    # A row of nothing but minus infinity would let any token out: where all that is allowed is barred, allowed wins.
    if params.allowed_token_ids is None or not barred.issuperset(params.allowed_token_ids):
        row[list(barred)] = -np.inf
    return row
