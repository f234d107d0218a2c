"""Qwen3-MoE: Qwen3's attention with normalised heads, and 128 small experts in each layer or in some."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.qwen_moe_family import QwenMoeConfig, qwen_mlp
from models.layers.weight_map import EXPERTS_LOAD_MAP, LLAMA_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | QK_NORM_LOAD_MAP | EXPERTS_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(QwenMoeConfig):
    """Qwen3-MoE's configuration; a window, where it is in use, holds for every layer."""

    attention_bias: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the window, if it is in use."""
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        return super().derive(config) | {"sliding_window": window, "layer_types": ()}


class Model(CausalLM[Config]):
    """Pre-norm layers with normalised heads."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer, with experts or without."""
        c = self.config
        bias = c.attention_bias
        return dense_layer(init, c, mlp=qwen_mlp(init, c, index), bias=bias, out_bias=bias, qk_norm=True)
