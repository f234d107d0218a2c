"""Qwen3: Llama's layer with each query and key head normalised before its rotation."""

from dataclasses import dataclass

from models.layers.causal_lm import CausalLM
from models.layers.config import QwenConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | QK_NORM_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(QwenConfig):
    """Qwen3's configuration."""

    head_dim: int = 128
    attention_bias: bool = False


class Model(CausalLM[Config]):
    """Pre-norm layers with normalised heads."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window only."""
        c = self.config
        return dense_layer(init, c, bias=c.attention_bias, out_bias=c.attention_bias, qk_norm=True)
