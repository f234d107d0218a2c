"""Mistral 7B and its descendants: Llama's layer, with a sliding window in some checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP

load_map = LLAMA_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """Mistral's configuration; `sliding_window` holds for every layer, and null is none."""

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the window of the first Mistral, whose configuration may leave it out."""
        return super().derive(config) | {"sliding_window": config.get("sliding_window", 4096), "layer_types": ()}


class Model(CausalLM[Config]):
    """Pre-norm layers without biases."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        return dense_layer(init, self.config)
