"""A language model whose norms are LayerNorms with biases, as all were before Llama."""

from dataclasses import dataclass
from typing import TypeVar

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig, LayerTraits
from models.layers.initializer import Initializer
from models.layers.norm import LayerNorm
from models.layers.rope import RopeFrequencies


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(DecoderConfig):
    """A configuration with the epsilon under one name; families have several for it."""

    layer_norm_eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class LearnedPositionConfig(LayerNormConfig):
    """A configuration of a model that adds a learned row for each position instead of rotating heads."""

    def layer_traits(self) -> tuple[LayerTraits, ...]:
        """Traits of layers that see everything and rotate nothing."""
        return (LayerTraits(rope=None),) * self.num_hidden_layers

    def rope_frequencies(self, max_model_len: int | None) -> tuple[RopeFrequencies, ...]:
        """None."""
        return ()


LayerNormConfigT = TypeVar("LayerNormConfigT", bound=LayerNormConfig)


class LayerNormLM(CausalLM[LayerNormConfigT]):
    """A model with LayerNorms."""

    def make_norm(self, init: Initializer, size: int) -> LayerNorm:
        """A LayerNorm with bias."""
        return LayerNorm(init, size, eps=self.config.layer_norm_eps)
