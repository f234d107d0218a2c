"""Truncation against the tokenizers library's own, which cannot be used: it is a setting of the shared object."""

from pathlib import Path

import pytest
import tokenizers

from paxserve.loaders.hf_tokenizer import load_folder_tokenizer
from paxserve.loaders.text_encoding import cut_text, encode_pair, encode_text

FOLDER = Path(__file__).parents[2] / "goldens" / "pooling" / "cross_encoder"
TOKENIZER = load_folder_tokenizer(FOLDER)
SHORT, LONG = "the sea", "a river runs to the sea in the sun"


def reference(limit, side="right"):
    backend = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    backend.enable_truncation(limit, strategy="longest_first", direction=side)
    return backend


@pytest.mark.parametrize("limit", [3, 4, 7, 8, 11, 30])
@pytest.mark.parametrize("side", ["left", "right"])
def test_one_text(limit, side):
    assert encode_text(TOKENIZER, LONG, limit=limit, side=side).token_ids == reference(limit, side).encode(LONG).ids


@pytest.mark.parametrize("limit", [4, 5, 6, 8, 9, 12, 30])
@pytest.mark.parametrize("texts", [(SHORT, LONG), (LONG, SHORT), (LONG, LONG)])
def test_pairs(texts, limit):
    expected = reference(limit).encode(*texts)
    encoded = encode_pair(TOKENIZER, *texts, limit=limit)
    assert encoded.token_ids == expected.ids
    assert encoded.num_first == expected.type_ids.index(1)


def test_without_special_tokens():
    encoded = encode_text(TOKENIZER, LONG, limit=3, add_special_tokens=False)
    assert encoded.token_ids == TOKENIZER.encode("a river runs", add_special_tokens=False)
    assert encoded.num_first is None


def test_cutting_a_text():
    assert cut_text(TOKENIZER, LONG, 3) == "a river runs"
    assert cut_text(TOKENIZER, LONG, 99) == LONG
