"""The tokenizer of a Hugging Face folder, read without transformers, whose import alone costs a second or more."""

from pathlib import Path
from typing import Any

import tokenizers

from paxserve.errors import ConfigError
from paxserve.loaders.chat_template import DEFAULT_TEMPLATE
from paxserve.loaders.json_file import read_optional_json_object
from paxserve.loaders.tokenizer import Tokenizer

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TYPED_CLASSES = ("BertTokenizer", "ElectraTokenizer")
OTHER_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def load_folder_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the folder `path`, from tokenizer.json or else whatever transformers can convert.

    What tokenizer.json says of BOS and EOS holds; add_bos_token in tokenizer_config.json is for conversions only.
    """
    config = read_optional_json_object(path / "tokenizer_config.json")
    special_tokens = _special_tokens(read_optional_json_object(path / "special_tokens_map.json"))
    special_tokens |= _special_tokens(config)
    if (path / "tokenizer.json").is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ConfigError(f"{path / 'tokenizer.json'} cannot be read: {error}.") from error
        _add_missing_tokens(backend, config, special_tokens)
    else:
        backend = _convert_with_transformers(path)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_templates=_chat_templates(path, config),
        has_token_types=_has_token_types(config),
    )


def _has_token_types(config: dict[str, Any]) -> bool:
    """Whether the model gets token_type_ids: what the file says, else what transformers does for its class."""
    names = config.get("model_input_names")
    if names is None:
        return str(config.get("tokenizer_class")).removesuffix("Fast") in TYPED_CLASSES
    return "token_type_ids" in names


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Text of each special token; stored either plain or as {"content": text, …}."""
    texts = {}
    for role in SPECIAL_ROLES:
        value = config.get(role)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            texts[role] = value
    return texts


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Tokens that tokenizer_config.json adds on top of tokenizer.json, in the order of their ids."""
    decoder = config.get("added_tokens_decoder") or {}
    added: list[tokenizers.AddedToken] = []
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if entry["content"] not in present:
            options = {name: entry[name] for name in ADDED_TOKEN_OPTIONS if name in entry}
            added.append(tokenizers.AddedToken(entry["content"], **options))
            present.add(entry["content"])
    backend.add_tokens(added)
    missing = [text for text in dict.fromkeys(special_tokens.values()) if text not in present]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    stored = config.get("chat_template") or read_optional_json_object(path / "chat_template.json").get("chat_template")
    if isinstance(stored, str):
        templates[DEFAULT_TEMPLATE] = stored
    elif isinstance(stored, list):
        templates |= {entry["name"]: entry["template"] for entry in stored}
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if (path / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = path / "chat_template.jinja"
    return templates | {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def _convert_with_transformers(path: Path) -> tokenizers.Tokenizer:
    if not any((path / name).is_file() for name in OTHER_TOKENIZER_FILES):
        raise ConfigError(f"{path} has no tokenizer.json: name a folder that has one with --tokenizer.")
    from transformers import AutoTokenizer  # only here: it would double the start time of every other model

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True).backend_tokenizer
    except Exception as error:  # its converters raise whatever a damaged file leads them to
        raise ConfigError(
            f"{path} has no tokenizer.json, and transformers cannot convert what it has: {error}"
        ) from error
