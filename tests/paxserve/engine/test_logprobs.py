import random

from paxserve.engine.logprobs import LogprobReader
from paxserve.engine.token_table import TokenTable
from paxserve.messages import TokenLogprobs
from tests.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer


def entry(*token_ids, rank=1):
    return TokenLogprobs(list(token_ids), [-0.5 * place for place in range(len(token_ids))], rank)


def test_the_chosen_token_comes_first_with_its_rank():
    position = LogprobReader(TokenTable(byte_level_tokenizer())).read(entry(40, 41, 42, rank=77))
    assert list(position) == [40, 41, 42]
    assert [logprob.rank for logprob in position.values()] == [77, 1, 2]
    assert position[40].logprob == 0.0
    assert position[40].decoded_token == byte_level_tokenizer().decode([40])


def test_a_chosen_token_among_the_most_likely_is_there_once():
    position = LogprobReader(None).read(TokenLogprobs([9, 7, 9], [-2.0, -1.0, -2.0], 2))
    assert {token_id: (p.logprob, p.rank) for token_id, p in position.items()} == {9: (-2.0, 2), 7: (-1.0, 1)}
    assert position[9].decoded_token is None


def test_chosen_tokens_join_to_the_text():
    text = "a 日本 é 😀."
    for tokenizer in (byte_level_tokenizer(), byte_fallback_tokenizer()):
        reader = LogprobReader(TokenTable(tokenizer))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        texts = [reader.read(entry(token_id))[token_id].decoded_token for token_id in token_ids]
        assert "".join(texts) == text
        assert "" in texts


def test_alternatives_are_spelt_in_their_place():
    tokenizer = byte_level_tokenizer()
    first, *rest = tokenizer.encode("é", add_special_tokens=False)
    letter = tokenizer.encode("x")[0]
    reader = LogprobReader(TokenTable(tokenizer))
    assert reader.read(entry(first, letter))[letter].decoded_token == "x"
    second = reader.read(entry(rest[0], letter))
    assert second[rest[0]].decoded_token == "é"
    assert second[letter].decoded_token == "\ufffdx"


def test_skipped_positions_count_as_text():
    tokenizer = byte_level_tokenizer()
    first, *rest = tokenizer.encode("é", add_special_tokens=False)
    reader = LogprobReader(TokenTable(tokenizer))
    reader.skip(first)
    assert reader.read(entry(rest[0]))[rest[0]].decoded_token == "é"


def test_random_tokens_never_raise():
    source, reader = random.Random(1), LogprobReader(TokenTable(byte_level_tokenizer()))
    for _ in range(2000):
        reader.read(entry(source.randrange(400), source.randrange(400), 10**6))
