import functools
import itertools
import random
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from paxserve.config import ModelConfig
from paxserve.engine.detokenizer import IncrementalDetokenizer
from paxserve.engine.token_table import TokenTable
from paxserve.loaders.checkpoint import open_tokenizer
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.sampling_params import SamplingParams
from tests.small_tokenizers import CORPUS, byte_fallback_tokenizer, byte_level_tokenizer, word_piece_tokenizer

HARD_TEXT = "안녕하세요 👩‍🚀🇰🇷 naïve — “끝” 你好 é"


@functools.cache
def demo_tokenizer():
    return open_tokenizer(ModelConfig(model="smollm2-135m-instruct"))


@functools.cache
def table_of(make):
    return TokenTable(make())


def stream(make, token_ids, *, sizes=None, **params):
    """The deltas of a whole output, fed one by one or in groups of the given sizes, and the detokenizer."""
    detokenizer = IncrementalDetokenizer(table_of(make), SamplingParams(max_tokens=10**6, **params))
    deltas, start = [], 0
    for size in sizes or itertools.repeat(1):
        group = token_ids[start : start + size]
        kept = detokenizer.append(group)
        deltas.append(detokenizer.take())
        start += kept
        if detokenizer.stop_string is not None or kept < len(group):
            return deltas, detokenizer
        if start >= len(token_ids):
            break
    detokenizer.finish()
    return [*deltas, detokenizer.take()], detokenizer


def draw_ids(make):
    size = make().vocab_size
    return st.lists(st.integers(0, size + 3), max_size=40)


SIZES = st.lists(st.integers(1, 5), min_size=1).map(itertools.cycle)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("make", [byte_level_tokenizer, demo_tokenizer])
@settings(deadline=None)
@given(data=st.data())
def test_random_bytes_decode_as_all_at_once(make, skip, data):
    token_ids, sizes = data.draw(draw_ids(make)), data.draw(SIZES)
    deltas, _ = stream(make, token_ids, sizes=sizes, skip_special_tokens=skip)
    assert "".join(deltas) == make().decode(token_ids, skip_special_tokens=skip)


def is_sound_until_fault(run):
    """Whether no character of a run of bytes is complete before the run turns out not to be UTF-8."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return error.start == 0
    return True


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_random_pieces_and_bytes_decode_as_all_at_once(skip, data):
    make = byte_fallback_tokenizer
    token_ids, sizes = data.draw(draw_ids(make)), data.draw(SIZES)
    table = table_of(make)
    visible = [i for i in token_ids if table.is_known(i) and not (skip and i in table.special_ids)]
    runs = itertools.groupby(map(table.raw_byte, visible), lambda byte: byte is not None)
    assume(all(is_sound_until_fault(bytes(run)) for is_bytes, run in runs if is_bytes))
    deltas, _ = stream(make, token_ids, sizes=sizes, skip_special_tokens=skip)
    assert "".join(deltas) == make().decode(token_ids, skip_special_tokens=skip)


def test_a_character_already_sent_stays_when_its_run_turns_bad():
    euro, broken = byte_fallback_tokenizer().encode("€", add_special_tokens=False), 4 + 0xFF
    deltas, _ = stream(byte_fallback_tokenizer, [*euro, broken, broken])
    assert deltas == ["", "", "€", "\ufffd", "\ufffd", ""]


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_unknown_decoders_are_streamed_too(skip, data):
    make = word_piece_tokenizer
    token_ids, sizes = data.draw(draw_ids(make)), data.draw(SIZES)
    deltas, _ = stream(make, token_ids, sizes=sizes, skip_special_tokens=skip)
    assert "".join(deltas) == make().decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer, word_piece_tokenizer])
def test_odd_ids_never_raise(make):
    odd = [-1, 10**6, 2**31, 2**32, 2**64, 0, 1, 5, 300]
    deltas, _ = stream(make, odd, skip_special_tokens=False)
    assert "".join(deltas) == make().decode([0, 1, 5, 300], skip_special_tokens=False)


@pytest.mark.parametrize("text", [HARD_TEXT, *CORPUS])
@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer, demo_tokenizer])
def test_no_delta_has_a_cut_character(make, text):
    token_ids = make().encode(text, add_special_tokens=False)
    deltas, _ = stream(make, token_ids)
    assert all("\ufffd" not in delta for delta in deltas)
    assert "".join(deltas) == text


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_an_output_that_ends_within_a_character_shows_it(make):
    token_ids = make().encode("x€", add_special_tokens=False)[:-1]
    deltas, _ = stream(make, token_ids)
    assert deltas[:-1] == ["x", *[""] * (len(token_ids) - 1)]
    assert deltas[-1] == make().decode(token_ids)[1:]
    assert set(deltas[-1]) == {"\ufffd"}


def test_special_tokens_are_skipped_or_not():
    token_ids = [*byte_level_tokenizer().encode("Hello"), 1]
    assert "".join(stream(byte_level_tokenizer, token_ids)[0]) == "Hello"
    assert "".join(stream(byte_level_tokenizer, token_ids, skip_special_tokens=False)[0]) == "Hello<|im_end|>"


TEXT = "The lazy dog jumps over 日本語 and the quick fox."


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer, demo_tokenizer])
@pytest.mark.parametrize("stop", ["zy d", "jumps", "本", "本語 an", ".", "The", " q"])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_string_cuts_the_text_whatever_the_tokens(make, stop, size, keep):
    tokenizer = make()
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    params = {"stop": ["@@never@@", stop], "include_stop_str_in_output": keep}
    deltas, detokenizer = stream(make, token_ids, sizes=itertools.repeat(size), **params)
    start = TEXT.index(stop)
    assert "".join(deltas) == TEXT[: start + len(stop) * keep]
    assert detokenizer.stop_string == stop
    # The output's tokens end with the one that completed the stop string.
    assert stop in tokenizer.decode(token_ids[: detokenizer.num_tokens])
    assert stop not in tokenizer.decode(token_ids[: detokenizer.num_tokens - 1])


@given(stop=st.text("the dog", min_size=1, max_size=6), data=st.data())
def test_text_before_a_stop_string_is_never_more_nor_less(stop, data):
    words = data.draw(st.lists(st.sampled_from(["the ", "dog", " do", "t", "h", "e", "g "]), max_size=12))
    tokenizer = byte_level_tokenizer()
    token_ids = [token_id for word in words for token_id in tokenizer.encode(word)]
    deltas, detokenizer = stream(byte_level_tokenizer, token_ids, sizes=data.draw(SIZES), stop=[stop])
    text = "".join(words)
    assert "".join(deltas) == (text[: text.index(stop)] if stop in text else text)
    assert (detokenizer.stop_string is not None) == (stop in text)


def test_text_is_held_only_while_it_may_be_a_stop_string():
    token_ids = [i for word in ["a", "b", "c", "a", "b", "x"] for i in byte_level_tokenizer().encode(word)]
    deltas, _ = stream(byte_level_tokenizer, token_ids, stop=["abx y"])
    assert deltas == ["", "", "abc", "", "", "", "abx"]


def test_min_tokens_bars_stop_strings():
    token_ids = [i for word in ["a", "b", "a", "b", "a", "b"] for i in byte_level_tokenizer().encode(word)]
    for size in (1, 6):
        deltas, detokenizer = stream(
            byte_level_tokenizer, token_ids, sizes=itertools.repeat(size), stop=["ab"], min_tokens=2
        )
        assert "".join(deltas) == "ab"
        assert detokenizer.num_tokens == 4
    # One that begins within the first tokens, but is completed after them, counts.
    deltas, detokenizer = stream(byte_level_tokenizer, token_ids, stop=["ab"], min_tokens=1)
    assert "".join(deltas) == ""
    assert detokenizer.num_tokens == 2


def test_the_stop_token_itself_is_not_read():
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer.encode("Hello dog")
    detokenizer = IncrementalDetokenizer(TokenTable(tokenizer), SamplingParams())
    assert detokenizer.append(token_ids, is_last_hidden=True) == len(token_ids)
    detokenizer.finish()
    assert detokenizer.take() == tokenizer.decode(token_ids[:-1])


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer, word_piece_tokenizer])
def test_cost_of_a_token_does_not_grow(make):
    source = random.Random(0)
    token_ids = [source.randrange(make().vocab_size) for _ in range(4000)]
    stream(make, token_ids, skip_special_tokens=False)  # fills the table
    seconds = []
    for count in (500, 4000):
        started = time.process_time()
        for _ in range(4000 // count):
            stream(make, token_ids[:count], skip_special_tokens=False)
        seconds.append(time.process_time() - started)
    assert seconds[1] < 5 * seconds[0]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Metaspace(),
    ],
    ids=["strip", "metaspace"],
)
def test_output_goes_on_after_its_prompt_with_the_space_between(decoder):
    backend = Backend.from_str(byte_fallback_tokenizer().backend.to_str())
    backend.decoder = decoder
    prompt, output = (backend.encode(text, add_special_tokens=False).ids for text in (" the", " lazy dog"))
    detokenizer = IncrementalDetokenizer(TokenTable(Tokenizer(backend)), SamplingParams(), prompt)
    detokenizer.append(output)
    detokenizer.finish()
    assert backend.decode(output) == "lazy dog"
    assert backend.decode(prompt + output) == "the lazy dog"
    assert detokenizer.take() == " lazy dog"
