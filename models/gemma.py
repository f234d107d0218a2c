"""Gemma 1: Llama's layer with Gemma's norms."""

from dataclasses import dataclass
from functools import partial

from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.gemma_family import GemmaConfig, GemmaLM
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP

load_map = LLAMA_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(GemmaConfig):
    """Gemma 1's configuration."""


class Model(GemmaLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        bias = self.config.attention_bias
        return dense_layer(init, self.config, norm=partial(self.make_norm, init), bias=bias, out_bias=bias)
