"""Seed-OSS: Llama's layer with biases on q, k and v."""

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
    """Seed-OSS's configuration."""

    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the head size that an absent key stands for."""
        return super().derive({"head_dim": 128, **config})


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        return dense_layer(init, c, bias=c.attention_bias, out_bias=c.attention_out_bias, mlp_bias=c.mlp_bias)
