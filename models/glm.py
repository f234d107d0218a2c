"""GLM-4 of 2024 in transformers' form (glm-4-9b-hf): GLM4's layer with norms before its blocks only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import FUSED_GATE_UP_LOAD_MAP, LLAMA_LOAD_MAP

load_map = {**LLAMA_LOAD_MAP, **FUSED_GATE_UP_LOAD_MAP}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """GLM's configuration, and GLM-4-0414's."""

    head_dim: int = 128
    rms_norm_eps: float = 1.5625e-07
    attention_bias: bool = True

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the share of a head that rotates, where it is left out."""
        return super().derive({"partial_rotary_factor": 0.5} | dict(config))


class Model(CausalLM[Config]):
    """Pre-norm layers whose heads rotate by half, in neighbouring pairs."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        return dense_layer(init, self.config, bias=self.config.attention_bias, interleaved_rope=True)
