"""Arcee (AFM): Llama's layer with a plain MLP of squared ReLUs."""

from dataclasses import dataclass

from models import llama
from models.layers.causal_lm import CausalLM
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.mlp import PlainMLP
from models.layers.weight_map import LLAMA_LOAD_MAP

load_map = LLAMA_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """Arcee's configuration: Llama's with other defaults."""

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5


class Model(CausalLM[Config]):
    """Pre-norm layers of grouped-query attention and a plain MLP."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        mlp = PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=c.mlp_bias)
        return dense_layer(init, c, mlp=mlp, bias=c.attention_bias, out_bias=c.attention_bias)
