"""Texts and pairs of texts to token ids with a limit on their number, whose special tokens are never cut off."""

from typing import Literal, NamedTuple

import tokenizers

from paxserve.errors import RequestError
from paxserve.loaders.tokenizer import Tokenizer

Side = Literal["left", "right"]


class EncodedText(NamedTuple):
    """Token ids, and how many of them are the first text's where there are two."""

    token_ids: list[int]
    num_first: int | None = None


def encode_text(
    tokenizer: Tokenizer, text: str, *, limit: int | None = None, side: Side = "right", add_special_tokens: bool = True
) -> EncodedText:
    """The ids of one text; more than `limit` are cut off at its `side`."""
    encoding = _encode(tokenizer.backend, text)
    if limit is not None:
        num_special = tokenizer.backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        encoding.truncate(max(limit - num_special, 0), direction=side)
    return EncodedText(tokenizer.backend.post_process(encoding, None, add_special_tokens).ids)


def encode_pair(tokenizer: Tokenizer, first: str, second: str, *, limit: int | None = None) -> EncodedText:
    """The ids of two texts as the tokenizer joins them; more than `limit` are cut off the longer one's end."""
    pair = (_encode(tokenizer.backend, first), _encode(tokenizer.backend, second))
    if limit is not None:
        room = max(limit - tokenizer.backend.num_special_tokens_to_add(is_pair=True), 0)
        shorter, longer = sorted(pair, key=lambda encoding: len(encoding.ids))
        num_shorter = len(shorter.ids) if 2 * len(shorter.ids) <= room else room // 2
        if num_shorter + len(longer.ids) > room:
            shorter.truncate(num_shorter)
            longer.truncate(room - num_shorter)
    joined = tokenizer.backend.post_process(*pair, True)
    types = joined.type_ids if tokenizer.has_token_types else []
    return EncodedText(joined.ids, types.index(1) if 1 in types else None)


def cut_text(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """The beginning of a text that is at most `limit` tokens long."""
    encoding = _encode(tokenizer.backend, text)
    return text if len(encoding.ids) <= limit else text[: encoding.offsets[limit - 1][1]]


def _encode(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        return backend.encode(text, add_special_tokens=False)
    except TypeError as error:
        raise RequestError("The text is not valid Unicode: it holds half a surrogate pair.") from error
