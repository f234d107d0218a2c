"""Ministral: Mistral's layer, some layers with a sliding window and some without."""

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
    """Ministral's configuration; without `layer_types`, the window holds for every layer."""

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the window that an absent key stands for; null is none."""
        return super().derive(config) | {"sliding_window": config.get("sliding_window", 4096)}


class Model(CausalLM[Config]):
    """Pre-norm layers without biases."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window only."""
        return dense_layer(init, self.config)
