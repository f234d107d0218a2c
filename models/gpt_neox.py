"""GPT-NeoX and Pythia: parallel blocks with a LayerNorm each, q, k and v fused by head, a quarter of each rotated."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.config import renamed
from models.layers.decoder import Layer
from models.layers.dense_layer import dense_attention, dense_layer
from models.layers.initializer import Initializer
from models.layers.layer_norm_lm import LayerNormConfig, LayerNormLM
from models.layers.mlp import PlainMLP
from models.layers.parallel_layer import ParallelLayer
from models.layers.weight_map import bias_lines, dealt, stored, transposed

WEIGHTS = {
    "embedding.weight": stored("gpt_neox.embed_in.weight"),
    "layers.*.attention_norm.weight": stored("gpt_neox.layers.*.input_layernorm.weight"),
    "layers.*.attention.qkv.weight": dealt("gpt_neox.layers.*.attention.query_key_value.weight", is_matrix=True),
    "layers.*.attention.out.weight": transposed("gpt_neox.layers.*.attention.dense.weight"),
    "layers.*.mlp_norm.weight": stored("gpt_neox.layers.*.post_attention_layernorm.weight"),
    "layers.*.mlp.up.weight": transposed("gpt_neox.layers.*.mlp.dense_h_to_4h.weight"),
    "layers.*.mlp.down.weight": transposed("gpt_neox.layers.*.mlp.dense_4h_to_h.weight"),
    "norm.weight": stored("gpt_neox.final_layer_norm.weight"),
    "head.weight": transposed("embed_out.weight"),
}
load_map = WEIGHTS | bias_lines(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Config(LayerNormConfig):
    """GPT-NeoX's configuration."""

    hidden_act: str = "gelu"
    attention_bias: bool = True
    use_parallel_residual: bool = True

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the rotation under the names used here; every head has its own keys."""
        older = renamed(config, rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
        own = {"partial_rotary_factor": 0.25, **older, **config, "num_key_value_heads": None}
        return super().derive(own)


class Model(LayerNormLM[Config]):
    """Layers parallel or, in some checkpoints, in a row."""

    def make_layer(self, init: Initializer, index: int) -> Layer:
        """One layer; all are alike."""
        c = self.config
        bias = c.attention_bias
        mlp = PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=True)
        if not c.use_parallel_residual:
            return dense_layer(init, c, norm=partial(self.make_norm, init), mlp=mlp, bias=bias, out_bias=bias)
        return ParallelLayer(
            attention_norm=self.make_norm(init, c.hidden_size),
            attention=dense_attention(init, c, bias=bias, out_bias=bias),
            mlp_norm=self.make_norm(init, c.hidden_size),
            mlp=mlp,
        )
