import pytest

from paxserve.engine.token_table import TokenTable, token_bytes
from tests.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, word_piece_tokenizer

TOKENIZERS = [byte_level_tokenizer, byte_fallback_tokenizer, word_piece_tokenizer]


@pytest.mark.parametrize(
    ("make", "syntax"), list(zip(TOKENIZERS, ["byte_level", "byte_fallback", "opaque"], strict=True))
)
def test_syntax_is_recognised(make, syntax):
    assert TokenTable(make()).syntax == syntax


@pytest.mark.parametrize("make", TOKENIZERS[:2])
@pytest.mark.parametrize("text", ["Hello the world", "日本 é 😀", "naïve — “x”"])
def test_bytes_of_tokens_join_to_the_text(make, text):
    tokenizer = make()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(tokenizer, token_id) for token_id in token_ids).decode() == text
    assert any(len(token_bytes(tokenizer, i).decode("utf-8", "ignore")) == 0 for i in token_ids) or text.isascii()


def test_special_tokens_stand_for_their_markup():
    assert token_bytes(byte_level_tokenizer(), 1) == b"<|im_end|>"
    assert token_bytes(byte_fallback_tokenizer(), 2) == b"</s>"
    assert token_bytes(word_piece_tokenizer(), 1) == b"[END]"
    assert TokenTable(byte_level_tokenizer()).special_ids == {0, 1}


def test_raw_bytes_are_told_from_text():
    tokenizer = byte_fallback_tokenizer()
    table = TokenTable(tokenizer)
    euro = tokenizer.encode("€", add_special_tokens=False)
    assert [table.raw_byte(token_id) for token_id in euro] == list("€".encode())
    assert table.raw_byte(tokenizer.encode("the", add_special_tokens=False)[0]) is None
    assert TokenTable(byte_level_tokenizer()).raw_byte(5) is None


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("odd", [-1, -(2**70), 10**6, 2**31, 2**32, 2**64])
def test_odd_ids_stand_for_nothing(make, odd):
    table = TokenTable(make())
    assert table.token_bytes(odd) == b""
    assert not table.is_known(odd)
    assert table.raw_byte(odd) is None
