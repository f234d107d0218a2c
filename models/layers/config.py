"""What the configurations of decoder-only families have in common, in Hugging Face's names."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from models.layers.activations import activation
from models.layers.rope import RopeFrequencies, RopeParameters, rope_frequencies


class LayerTraits(NamedTuple):
    """In what one layer's computation differs from the others'."""

    window: int = 0
    """Tokens that a query sees, itself included; 0 is all."""
    rope: int | None = 0
    """Index into the model's rotary tables; None is no rotation."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A checkpoint's configuration; fields without a default must be in its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters = RopeParameters()
    local_rope_parameters: RopeParameters | None = None
    """Of the sliding layers, where they rotate differently."""
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    is_causal: bool = True
    """Whether tokens see only those before them; a model that sees both ways cannot generate."""
    classifier_pooling: Literal["cls", "mean", "last"] = "last"
    """Which tokens' outputs a classification head reads."""
    embedding_multiplier: float = 1.0
    """What token embeddings are multiplied by before the first layer."""
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    """Bound that a hyperbolic tangent keeps the logits within."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {self.num_attention_heads} "
                f"and {self.num_key_value_heads}."
            )
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types must name {self.num_hidden_layers} layers, got {len(self.layer_types)}.")
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(
                f"layer_types must be full_attention or sliding_attention, got {', '.join(sorted(unknown))}."
            )
        activation(self.hidden_act)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """The configuration from config.json's content; a key that is absent or null takes the default.

        Raises `ValueError` for what is missing, or present and not supported.
        """
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method")
            raise ValueError(
                f"quantization_config (quant_method {method!r}) is not supported: use an unquantised model."
            )
        values = cls.derive(config)
        names = [f.name for f in dataclasses.fields(cls)]
        values |= {name: config[name] for name in names if config.get(name) is not None and name not in values}
        required = [
            f.name
            for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
        ]
        if required:
            raise ValueError(f"config.json lacks {', '.join(required)}.")
        frozen: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**frozen)

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields whose value is not simply the key of the same name; families extend it."""
        values: dict[str, Any] = {}
        num_heads = config.get("num_attention_heads")
        if config.get("num_key_value_heads") is None and num_heads:
            values["num_key_value_heads"] = num_heads
        if config.get("head_dim") is None and num_heads and config.get("hidden_size"):
            values["head_dim"] = config["hidden_size"] // num_heads
        values["rope_parameters"] = RopeParameters.from_hf(config)
        return values

    def unused_tensors(self) -> tuple[str, ...]:
        """Beginnings of the names of stored tensors that the model has no use for."""
        return ()

    def layer_traits(self) -> tuple[LayerTraits, ...]:
        """Traits of each layer: with `layer_types`, the window is on the sliding ones only."""
        window = self.sliding_window or 0
        if not self.layer_types:
            return (LayerTraits(window),) * self.num_hidden_layers
        sliding = LayerTraits(window, 0 if self.local_rope_parameters is None else 1)
        return tuple(sliding if kind == "sliding_attention" else LayerTraits() for kind in self.layer_types)

    def rope_frequencies(self, max_model_len: int | None) -> tuple[RopeFrequencies, ...]:
        """The rotary frequencies that `LayerTraits.rope` indexes."""
        return tuple(
            rope_frequencies(
                rope,
                self.head_dim,
                max_position_embeddings=self.max_position_embeddings,
                max_model_len=max_model_len,
            )
            for rope in (self.rope_parameters, self.local_rope_parameters)
            if rope is not None
        )


def rope_by_layer_type(config: Mapping[str, Any], *, theta: float, local_theta: float) -> dict[str, RopeParameters]:
    """Both rotations of a configuration that has one for full and one for sliding layers.

    In the older keys, `rope_scaling` is the full layers' alone; the arguments are the bases if none is given.
    """
    own = config.get("rope_parameters") or {}
    full, local = own.get("full_attention"), own.get("sliding_attention")
    base = {"rope_theta": theta} | {key: value for key, value in config.items() if value is not None}
    return {
        "rope_parameters": RopeParameters.from_hf(base, full),
        "local_rope_parameters": RopeParameters.from_hf(base, {"rope_theta": local_theta} | dict(local or {})),
    }


def renamed(config: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Values of older keys under the names used here: `hidden_size="n_embd"` gives {"hidden_size": …}."""
    return {name: config[key] for name, key in names.items() if config.get(key) is not None}


def refuse(config: Mapping[str, Any], **supported: Any) -> None:
    """Raise `ValueError` for a key that is set to anything but the one supported value."""
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} = {config[key]!r} is not supported: only {value!r} is.")


def layer_pattern(config: Mapping[str, Any], period: int) -> tuple[str, ...]:
    """The configuration's `layer_types`; where it lists none, every `period`th layer is full and the rest slide."""
    listed = config.get("layer_types")
    if listed is not None:
        return tuple(listed)
    num_layers = config.get("num_hidden_layers", 0)
    return tuple("sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers))


@dataclass(frozen=True, kw_only=True)
class QwenConfig(DecoderConfig):
    """A configuration whose window is off unless `use_sliding_window`, and then holds from a certain layer up."""

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the window and, where they are not listed, the layers that have it."""
        values = super().derive(config)
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        values["sliding_window"] = window
        if config.get("layer_types") is None:
            first, num_layers = config.get("max_window_layers", 28), config.get("num_hidden_layers", 0)
            kinds = ("full_attention", "sliding_attention")
            values["layer_types"] = tuple(kinds[window is not None and i >= first] for i in range(num_layers))
        return values
