"""Granite 3: Llama's layer with multipliers on embeddings, attention, residuals and logits."""

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
    """Granite's configuration."""

    attention_bias: bool = False
    mlp_bias: bool = False
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the factor on the logits, which the checkpoint states as a divisor."""
        return super().derive(config) | {"logit_scale": 1.0 / config.get("logits_scaling", 1.0)}


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        return dense_layer(
            init,
            c,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            mlp_bias=c.mlp_bias,
            scale=c.attention_multiplier,
            residual_multiplier=c.residual_multiplier,
        )
