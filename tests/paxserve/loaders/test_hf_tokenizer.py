import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.processors import ByteLevel, TemplateProcessing

from paxserve.errors import ConfigError
from paxserve.loaders.hf_tokenizer import load_folder_tokenizer

TEXTS = ["", "hello </s> there", "naïve <s> 🙂", " <tool>x</tool> "]


def write_tokenizer(path: Path, *, config: dict[str, Any] | None = None, adds_bos: bool = False) -> Path:
    """A folder with a byte-level tokenizer.json, and tokenizer_config.json if there is a `config`."""
    path.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    backend.post_processor = ByteLevel(trim_offsets=False)
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text('{"model_type": "llama"}')
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


ADDED = {
    "content": "<tool>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": False,
}  # fmt: skip
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
CONFIGS = {
    "plain": {**CLASS, "bos_token": "<s>", "eos_token": "</s>"},
    "as_objects": {
        **CLASS,
        "bos_token": {**ADDED, "content": "<s>", "special": True, "__type": "AddedToken"},
        "eos_token": {**ADDED, "content": "</s>", "special": True, "__type": "AddedToken"},
    },
    "add_flags": {**CLASS, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    "no_add_flags": {**CLASS, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": False},
    "more_tokens": {
        **CLASS,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "added_tokens_decoder": {"258": ADDED, "259": {**ADDED, "content": "</tool>", "special": True}},
    },
}


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_same_ids_as_transformers(tmp_path, config, adds_bos):
    from transformers import AutoTokenizer  # only these tests pay for its import

    path = write_tokenizer(tmp_path / "t", config=config, adds_bos=adds_bos)
    expected, tokenizer = AutoTokenizer.from_pretrained(path), load_folder_tokenizer(path)
    for text in TEXTS:
        for special in (True, False):
            assert tokenizer.encode(text, special) == expected.encode(text, add_special_tokens=special), text
        ids = expected.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == expected.decode(ids, skip_special_tokens=skip)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, name) == getattr(expected, name)
    assert tokenizer.vocab_size == len(expected)
    assert tokenizer.convert_ids_to_tokens(range(250, 258)) == expected.convert_ids_to_tokens(range(250, 258))


def test_no_config_at_all(tmp_path):
    tokenizer = load_folder_tokenizer(write_tokenizer(tmp_path / "t"))
    assert tokenizer.encode("a") != []
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None


def test_special_tokens_map(tmp_path):
    path = write_tokenizer(tmp_path / "t", config={})
    (path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    tokenizer = load_folder_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)


def test_chat_template_of_the_config(tmp_path):
    assert load_folder_tokenizer(write_tokenizer(tmp_path, config={"chat_template": "T"})).chat_template == "T"


def test_named_chat_templates(tmp_path):
    stored = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    tokenizer = load_folder_tokenizer(write_tokenizer(tmp_path, config={"chat_template": stored}))
    assert tokenizer.chat_templates == {"default": "D", "tool_use": "U"}


def test_template_files_win(tmp_path):
    path = write_tokenizer(tmp_path, config={"chat_template": "old"})
    (path / "chat_template.jinja").write_text("{{ 'nouveau' }} é", encoding="utf-8")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    tokenizer = load_folder_tokenizer(path)
    assert tokenizer.chat_template == "{{ 'nouveau' }} é"
    assert tokenizer.chat_templates["tool_use"] == "U"


def test_no_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: name a folder that has one"):
        load_folder_tokenizer(tmp_path)


def test_damaged_tokenizer_json(tmp_path):
    path = write_tokenizer(tmp_path)
    whole = (path / "tokenizer.json").read_bytes()
    (path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_folder_tokenizer(path)


def test_vocabulary_and_merges_files_are_converted(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_folder_tokenizer(tmp_path)
    assert tokenizer.encode("ab<|endoftext|>") == [256, 257]
    assert tokenizer.eos_token_id == 257


def test_files_that_cannot_be_converted(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="transformers cannot convert what it has"):
        load_folder_tokenizer(tmp_path)


def test_transformers_is_not_imported(tmp_path):
    write_tokenizer(tmp_path, config=CONFIGS["more_tokens"])
    script = (
        "import sys; from pathlib import Path; from paxserve.loaders.hf_tokenizer import load_folder_tokenizer\n"
        f"load_folder_tokenizer(Path({str(tmp_path)!r})); print({{'transformers', 'torch'}} & set(sys.modules))"
    )
    path = [entry for entry in sys.path if entry]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
