"""What sentence-transformers leaves beside a checkpoint: its pooling, projections, normalisation and prompts."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.layers.pooling import Pooling
from paxserve.errors import ConfigError
from paxserve.loaders.json_file import read_json_object, read_optional_json_object

POOLING_MODES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}


@dataclass(frozen=True, kw_only=True)
class DenseModule:
    """One projection of the pooled vector."""

    path: Path
    """Folder of its weights."""
    in_size: int
    out_size: int
    bias: bool
    act: str | None


@dataclass(frozen=True, kw_only=True)
class SentenceTransformersConfig:
    """The modules after the transformer, and how texts are prepared for it."""

    pooling: Pooling
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_transformers_config(folder: Path) -> SentenceTransformersConfig | None:
    """What `modules.json` in the folder asks for, or None where there is none.

    Raises `ConfigError` for a module or a mode of pooling that is not supported.
    """
    path = folder / "modules.json"
    if not folder.is_dir() or not path.is_file():
        return None
    pooling: Pooling | None = None
    dense: list[DenseModule] = []
    normalize = False
    for name, own in _modules(path):
        if normalize:
            raise ConfigError(f"{path}: {name} after Normalize is not supported.")
        if name == "Pooling":
            pooling = _pooling(own / "config.json")
        elif name == "Dense" and pooling is not None:
            dense.append(_dense(own))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise ConfigError(f"{path}: the module {name} is not supported (Transformer, Pooling, Dense, Normalize).")
    if pooling is None:
        return None
    text = read_optional_json_object(folder / "sentence_bert_config.json")
    general = read_optional_json_object(folder / "config_sentence_transformers.json")
    return SentenceTransformersConfig(
        pooling=pooling,
        dense=tuple(dense),
        normalize=normalize,
        max_tokens=text.get("max_seq_length"),
        lower_case=bool(text.get("do_lower_case")),
        prompts={name: prompt for name, prompt in (general.get("prompts") or {}).items() if isinstance(prompt, str)},
        default_prompt=general.get("default_prompt_name"),
    )


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Name and folder of each module, in order."""
    try:
        entries = json.loads(path.read_bytes())
        # Every release has moved the classes to another package; their names stay.
        return [(entry["type"].rpartition(".")[2], path.parent / entry["path"]) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a list of sentence-transformers modules: {error!r}.") from error


def _pooling(path: Path) -> Pooling:
    config = read_json_object(path)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    modes = modes or [name for key, name in OLD_POOLING_KEYS.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        raise ConfigError(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported: cls, mean, lasttoken."
        )
    if config.get("include_prompt") is False:
        raise ConfigError(f"{path}: include_prompt=false is not supported: prompts are pooled with their texts.")
    return POOLING_MODES[modes[0]]


def _dense(folder: Path) -> DenseModule:
    config = read_json_object(folder / "config.json")
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ConfigError(f"{folder}: the activation {name} is not supported: {', '.join(ACTIVATIONS)}.")
    sizes: dict[str, Any] = {"in_size": config.get("in_features"), "out_size": config.get("out_features")}
    if not all(isinstance(size, int) for size in sizes.values()):
        raise ConfigError(f"{folder / 'config.json'} must have in_features and out_features.")
    return DenseModule(path=folder, bias=bool(config.get("bias", True)), act=ACTIVATIONS[name], **sizes)
