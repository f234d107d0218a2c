"""A tokenizer built from GGUF metadata, which store vocabulary, merges or scores, and the name of the pre-tokenizer."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from paxserve.errors import ConfigError
from paxserve.loaders.chat_template import DEFAULT_TEMPLATE
from paxserve.loaders.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE_MARK = "▁"
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORD = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORD + r"\p{N}{1,3}" + REST
QWEN2 = WORD + r"\p{N}" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}" + CASED_REST
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}" + CASED_REST
)
# The expressions that llama.cpp goes by for each `tokenizer.ggml.pre`; each one splits the pieces of the one before.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "phi-2", "jais", "trillion"), (GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", GPT2)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (QWEN2,)),
    **dict.fromkeys(("tekken",), (TEKKEN,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (GPT4O,)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"),
}
# Here a piece that is in the vocabulary is one token, even if merges would not lead to it.
WHOLE_PIECES_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken", "gpt-4o", "llama4"}
BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that the metadata of the GGUF file `source` describes."""
    tokens = metadata.get(PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError(f"{source} has no {PREFIX}tokens: name another source with --tokenizer.")
    kinds = _per_token(metadata, "token_type", tokens, source)
    model = metadata.get(PREFIX + "model")
    if model == "gpt2":
        backend = _byte_level_backend(metadata, tokens, source)
    elif model == "llama":
        backend = _sentencepiece_backend(metadata, tokens, kinds, source)
    else:
        raise ConfigError(f"{source} has a tokenizer of type {model!r}, supported in GGUF are gpt2 and llama.")
    _add_special_tokens(backend, tokens, kinds)
    ids = {role: metadata.get(f"{PREFIX}{name}_token_id") for name, role in ROLES.items()}
    special_tokens = {role: tokens[i] for role, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    _add_edge_tokens(backend, metadata, special_tokens)
    return Tokenizer(backend, special_tokens=special_tokens, chat_templates=_chat_templates(metadata))


def _per_token(metadata: Mapping[str, Any], key: str, tokens: list[str], source: str) -> list[Any]:
    values = metadata.get(PREFIX + key)
    if not isinstance(values, list) or len(values) != len(tokens):
        got = len(values) if isinstance(values, list) else 0
        raise ConfigError(f"{source} must give one {PREFIX}{key} a token, got {got} for {len(tokens)}.")
    return values


def _byte_level_backend(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tokenizers.Tokenizer:
    pre = metadata.get(PREFIX + "pre", "default")
    if pre not in SPLITS:
        raise ConfigError(
            f"{source} has the unknown pre-tokenizer {pre!r}, known are {', '.join(sorted(SPLITS))}: "
            "name another source with --tokenizer."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(PREFIX + "merges", [])]
    try:
        model = models.BPE(
            dict(zip(tokens, range(len(tokens)), strict=True)), merges, ignore_merges=pre in WHOLE_PIECES_FIRST
        )
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ConfigError(f"{source} has a vocabulary and merges that do not fit together: {error}.") from error
    backend = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], source: str
) -> tokenizers.Tokenizer:
    scores = _per_token(metadata, "scores", tokens, source)
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    unknown_id = metadata.get(PREFIX + "unknown_token_id", 0)
    if not isinstance(unknown_id, int) or not 0 <= unknown_id < len(tokens):
        raise ConfigError(f"{source} has {PREFIX}unknown_token_id {unknown_id}, but {len(tokens)} tokens.")
    merges = _merges_from_scores(tokens, kinds, scores)
    model = models.BPE(vocab, merges, unk_token=tokens[unknown_id], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    has_prefix = metadata.get(PREFIX + "add_space_prefix", True)
    prepend = [normalizers.Prepend(SPACE_MARK)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges that act as SentencePiece's scores do: any neighbours join whose union is a token, best score first."""
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    order = sorted(
        (i for i, kind in enumerate(kinds) if kind == NORMAL and len(tokens[i]) > 1), key=lambda i: -scores[i]
    )
    merges = []
    for token in map(tokens.__getitem__, order):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _add_edge_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    adds_by_default = metadata[PREFIX + "model"] == "llama" or metadata.get(PREFIX + "pre") in BOS_BY_DEFAULT
    bos = special_tokens.get("bos_token") if metadata.get(PREFIX + "add_bos_token", adds_by_default) else None
    eos = special_tokens.get("eos_token") if metadata.get(PREFIX + "add_eos_token", False) else None
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    if len(single) > 1:
        special = [(token, backend.token_to_id(token)) for token in dict.fromkeys(t for t in single if t != "$A")]
        backend.post_processor = TemplateProcessing(single=single, special_tokens=special)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    names = {name: f"tokenizer.chat_template.{name}" for name in metadata.get("tokenizer.chat_templates", [])}
    names[DEFAULT_TEMPLATE] = "tokenizer.chat_template"
    return {name: metadata[key] for name, key in names.items() if key in metadata}
