from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.processors import TemplateProcessing

from paxserve.errors import RequestError
from paxserve.loaders.tokenizer import Tokenizer

ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_backend() -> tokenizers.Tokenizer:
    """Every byte a token, <s> in front, <tool> added but not special, and a gap before the last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), special_tokens=ROLES, chat_templates={"default": "{{ bos_token }}{{ messages }}"})


def test_ids(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, None)
    assert tokenizer.all_special_ids == [256, 257]
    assert tokenizer.vocab_size == 259
    assert tokenizer.max_token_chars == len("<tool>")


@pytest.mark.parametrize("text", ["", " ", "plain", "naïve 🙂\n\t x", "\x00\x7f"])
def test_round_trip(tokenizer, text):
    assert tokenizer.encode(text)[0] == 256
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_in_the_text(tokenizer):
    text = "a</s><tool>"
    assert tokenizer.encode(text, False)[1:] == [257, 258]
    literal = tokenizer.encode(text, False, parse_special=False)
    assert 257 not in literal
    assert literal[-1] == 258  # an ordinary added token stays a token
    assert tokenizer.decode(literal) == text
    assert tokenizer.encode(text, False)[1:] == [257, 258]  # the setting does not leak into other calls


def test_decode_skips_special_tokens_only_if_asked(tokenizer):
    ids = [256, *tokenizer.encode("hi", False), 257]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hi</s>"


def test_token_names(tokenizer):
    assert tokenizer.convert_ids_to_tokens([256, 258, 9999]) == ["<s>", "<tool>", None]
    assert tokenizer.convert_tokens_to_ids(["<s>", "nope"]) == [256, None]


@pytest.mark.parametrize("ids", [[-1], [2**40]])
def test_impossible_ids(tokenizer, ids):
    with pytest.raises(RequestError, match="between 0 and 258"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("parse_special", [True, False])
def test_half_a_surrogate_pair(tokenizer, parse_special):
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("\ud83d", parse_special=parse_special)


def test_stored_truncation_and_padding_are_dropped():
    backend = byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode("123456789")) == 10


def test_a_role_makes_a_token_special():
    backend = byte_backend()
    assert Tokenizer(backend, special_tokens={"eos_token": "<tool>"}).all_special_ids == [256, 257, 258]


def test_decode_stream_works_on_the_backend(tokenizer):
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer.backend, i) for i in tokenizer.encode("a🙂b")]
    assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]


def test_threads_agree():
    tokenizer = Tokenizer(byte_backend())
    texts = [f"</s> text {i} <tool>" for i in range(64)]
    expected = [tokenizer.encode(text, parse_special=False) for text in texts]
    fresh = Tokenizer(byte_backend())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: fresh.encode(text, parse_special=False), texts)) == expected


def test_chat_template_sees_special_tokens_and_arguments(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<s>" + str(messages)
    template = "{{ eos_token }}{{ tools }}{{ add_generation_prompt }}{{ thinking }}"
    assert tokenizer.apply_chat_template(messages, chat_template=template, thinking=3) == "</s>NoneTrue3"


def test_template_for_tools():
    tokenizer = Tokenizer(byte_backend(), chat_templates={"default": "plain", "tool_use": "tools"})
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "tools"


def test_no_template():
    with pytest.raises(RequestError, match="has no chat template"):
        Tokenizer(byte_backend()).apply_chat_template([])


def test_exclusive_options(tokenizer):
    with pytest.raises(RequestError, match="exclude each other"):
        tokenizer.apply_chat_template([{"content": "a"}], continue_final_message=True, add_generation_prompt=True)
