"""Qwen2 and Qwen2.5: Llama's layer with biases on q, k and v, and a sliding window in the upper layers of some."""

from dataclasses import dataclass

from models.layers.causal_lm import CausalLM
from models.layers.config import QwenConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP

load_map = LLAMA_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(QwenConfig):
    """Qwen2's configuration."""


class Model(CausalLM[Config]):
    """Pre-norm layers with q, k and v biases."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window only."""
        return dense_layer(init, self.config, bias=True)
