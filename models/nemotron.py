"""Nemotron 3 and 4, Minitron: LayerNorms stored less one, a squared ReLU, half of each head rotated."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.config import renamed
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.layer_norm_lm import LayerNormConfig, LayerNormLM
from models.layers.mlp import PlainMLP
from models.layers.norm import LayerNorm
from models.layers.weight_map import LLAMA_LOAD_MAP, bias_lines

load_map = LLAMA_LOAD_MAP | bias_lines(LLAMA_LOAD_MAP)


@dataclass(frozen=True, kw_only=True)
class Config(LayerNormConfig):
    """Nemotron's configuration."""

    hidden_act: str = "relu2"
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the share of a head that rotates, where it is left out, and the epsilon under the name used here."""
        return super().derive({"partial_rotary_factor": 0.5, **config}) | renamed(config, layer_norm_eps="norm_eps")


class Model(LayerNormLM[Config]):
    """Pre-norm layers with a plain MLP."""

    def make_norm(self, init: Initializer, size: int) -> LayerNorm:
        """A LayerNorm whose weights are stored less one."""
        return LayerNorm(init, size, eps=self.config.layer_norm_eps, offset=1.0)

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        mlp = PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=c.mlp_bias)
        norm = partial(self.make_norm, init)
        return dense_layer(init, c, norm=norm, mlp=mlp, bias=c.attention_bias, out_bias=c.attention_bias)
