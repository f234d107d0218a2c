"""StarCoder2: LayerNorms, a plain MLP, biases everywhere, a sliding window in some checkpoints."""

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
from models.layers.weight_map import LLAMA_LOAD_MAP, bias_lines, transposed

WEIGHTS = LLAMA_LOAD_MAP | {
    "layers.*.mlp.up.weight": transposed("model.layers.*.mlp.c_fc.weight"),
    "layers.*.mlp.down.weight": transposed("model.layers.*.mlp.c_proj.weight"),
}
load_map = WEIGHTS | bias_lines(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Config(LayerNormConfig):
    """StarCoder2's configuration; `sliding_window` holds for every layer."""

    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    use_bias: bool = True

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the norms' epsilon under the name used here."""
        return super().derive(config) | renamed(config, layer_norm_eps="norm_epsilon") | {"layer_types": ()}


class Model(LayerNormLM[Config]):
    """Pre-norm layers with a plain MLP."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        mlp = PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=c.use_bias)
        norm = partial(self.make_norm, init)
        return dense_layer(init, c, norm=norm, mlp=mlp, bias=c.use_bias, out_bias=c.use_bias)
