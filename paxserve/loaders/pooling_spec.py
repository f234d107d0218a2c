"""Whether a checkpoint is run for text or for vectors, and how its vectors come about."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from models.layers.pooling import Pooling
from models.layers.weight_map import SCORE_LOAD_MAP
from paxserve.config import ModelConfig
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import Checkpoint
from paxserve.loaders.sentence_transformers_config import (
    DenseModule,
    SentenceTransformersConfig,
    read_sentence_transformers_config,
)

Activation = Literal["none", "normalize", "sigmoid", "softmax"]
POOLING_NAMES: dict[str, Pooling] = {"CLS": "cls", "MEAN": "mean", "LAST": "last"}
HEAD = "head.weight"


@dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """From hidden states to answers."""

    task: Literal["embed", "classify"]
    pooling: Pooling
    activation: Activation
    """What is done to a vector unless the request says otherwise."""
    use_activation: bool = True
    """Whether it is done when the request says nothing."""
    num_labels: int = 0
    labels: tuple[str, ...] = ()
    dense: tuple[DenseModule, ...] = ()
    score_tokens: tuple[str, str] | None = None
    """A language model's words for no and yes, whose difference is the score."""
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def resolve_pooling(
    checkpoint: Checkpoint, architecture: ModuleType, model_config: Any, settings: ModelConfig
) -> PoolingSpec | None:
    """How the checkpoint pools, or None if it is to generate.

    Raises `ConfigError` where the checkpoint cannot do what is asked of it.
    """
    own = read_sentence_transformers_config(checkpoint.path)
    kind = _architecture_name(checkpoint.hf_config)
    is_encoder = HEAD not in architecture.load_map
    can_generate = not is_encoder and model_config.is_causal
    if settings.runner == "generate" and not can_generate:
        raise ConfigError(
            f"{checkpoint.name} cannot generate: {kind or 'the model'} sees both ways. Use runner=pooling."
        )
    is_pooling = settings.runner == "pooling"
    if settings.runner == "auto":
        is_classifier = kind.endswith("ForSequenceClassification")
        is_bare = kind.endswith("Model") and not kind.endswith("LMHeadModel")
        is_pooling = not can_generate or own is not None or is_classifier or is_bare
    if not is_pooling:
        if settings.pooler_config:
            raise ConfigError(
                f"pooler_config is for pooling models, and {checkpoint.name} generates. Use runner=pooling."
            )
        return None
    if kind.endswith(("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")):
        raise ConfigError(f"{checkpoint.name}: {kind} is not supported.")
    if kind.endswith("ForSequenceClassification"):
        spec = _classifier(checkpoint, architecture, model_config)
    else:
        spec = _embedder(checkpoint.hf_config, own, "cls" if is_encoder else "last")
    return _overridden(spec, settings.pooler_config)


def _architecture_name(hf_config: Mapping[str, Any]) -> str:
    names = hf_config.get("architectures") or [""]
    return str(names[0])


def _embedder(
    hf_config: Mapping[str, Any], own: SentenceTransformersConfig | None, default_pooling: Pooling
) -> PoolingSpec:
    dimensions = tuple(hf_config.get("matryoshka_dimensions") or ())
    is_matryoshka = bool(hf_config.get("is_matryoshka") or dimensions)
    values: dict[str, Any] = {"is_matryoshka": is_matryoshka, "matryoshka_dimensions": dimensions}
    if own is None:
        return PoolingSpec(task="embed", pooling=default_pooling, activation="normalize", **values)
    return PoolingSpec(
        task="embed",
        pooling=own.pooling,
        activation="normalize",
        use_activation=own.normalize,
        dense=own.dense,
        max_tokens=own.max_tokens,
        lower_case=own.lower_case,
        prompts=own.prompts,
        default_prompt=own.default_prompt,
        **values,
    )


def _classifier(checkpoint: Checkpoint, architecture: ModuleType, model_config: Any) -> PoolingSpec:
    hf_config = checkpoint.hf_config
    tokens = hf_config.get("classifier_from_token")
    if tokens is not None:
        if not isinstance(tokens, list) or len(tokens) != 2 or HEAD not in architecture.load_map:
            raise ConfigError(
                f"classifier_from_token must be two tokens (no, yes) of a language model, got {tokens!r}."
            )
        return PoolingSpec(
            task="classify", pooling="last", activation="sigmoid", num_labels=1, labels=("LABEL_0",),
            score_tokens=(str(tokens[0]), str(tokens[1])),
        )  # fmt: skip
    if "classifier.out.weight" not in SCORE_LOAD_MAP | architecture.load_map:
        raise ConfigError(f"{checkpoint.name}: this family has no classification head here.")
    names = {int(key): str(name) for key, name in (hf_config.get("id2label") or {}).items()}
    num_labels = hf_config.get("num_labels") or len(names) or 2
    return PoolingSpec(
        task="classify",
        pooling=model_config.classifier_pooling,
        activation=_class_activation(hf_config, num_labels),
        num_labels=num_labels,
        labels=tuple(names.get(index, f"LABEL_{index}") for index in range(num_labels)),
    )


def _class_activation(hf_config: Mapping[str, Any], num_labels: int) -> Activation:
    """Sigmoid for one label, softmax for several, unless the configuration names another."""
    named = (hf_config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or hf_config.get("sbert_ce_default_activation_function")
    if named:
        name = str(named).rpartition(".")[2]
        known: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}
        if name not in known:
            raise ConfigError(f"The activation {named} of the scores is not supported: Identity or Sigmoid.")
        return known[name]
    match hf_config.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
    return "softmax" if num_labels > 1 else "sigmoid"


def _overridden(spec: PoolingSpec, given: Mapping[str, Any]) -> PoolingSpec:
    """The spec with what the user set in `pooler_config`."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in ("pooling_type", "seq_pooling_type"):
            name = str(value).upper()
            if name not in POOLING_NAMES:
                raise ConfigError(f"pooler_config: {key} must be one of {', '.join(POOLING_NAMES)}, got {value!r}.")
            values["pooling"] = POOLING_NAMES[name]
        elif key == "use_activation" and isinstance(value, bool):
            values["use_activation"] = value
        else:
            raise ConfigError(
                f"pooler_config: {key}={value!r} is not supported: pooling_type, use_activation (a truth value)."
            )
    return PoolingSpec(**{**vars(spec), **values})
