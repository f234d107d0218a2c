"""Llama 1 to 3 and what is built like it (SmolLM2, TinyLlama, Yi …)."""

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
    """Llama's configuration; it knows no sliding window."""

    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out what transformers does not read for this family."""
        return super().derive(config) | {"sliding_window": None, "layer_types": ()}


class Model(CausalLM[Config]):
    """Pre-norm layers of grouped-query attention and a gated MLP."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        return dense_layer(init, c, bias=c.attention_bias, out_bias=c.attention_bias, mlp_bias=c.mlp_bias)
