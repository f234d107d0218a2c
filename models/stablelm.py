"""StableLM 2 and 3B: LayerNorms, a gated MLP, a quarter of each head rotated, parallel blocks in some checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.decoder import Layer
from models.layers.dense_layer import dense_attention, dense_layer
from models.layers.head_norms import norms_of_each_head
from models.layers.initializer import Initializer
from models.layers.layer_norm_lm import LayerNormConfig, LayerNormLM
from models.layers.mlp import GatedMLP
from models.layers.parallel_layer import ParallelLayer
from models.layers.weight_map import LLAMA_LOAD_MAP, bias_lines, stored

load_map = {
    **LLAMA_LOAD_MAP,
    **bias_lines(LLAMA_LOAD_MAP),
    "layers.*.attention.q_norm.weight": stored("model.layers.*.self_attn.q_layernorm.norms.*.weight"),
    "layers.*.attention.k_norm.weight": stored("model.layers.*.self_attn.k_layernorm.norms.*.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Config(LayerNormConfig):
    """StableLM's configuration."""

    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the share of a head that rotates, where it is left out."""
        return super().derive({"partial_rotary_factor": 0.25, **config}) | {"sliding_window": None, "layer_types": ()}


class Model(LayerNormLM[Config]):
    """Layers in a row or parallel."""

    def make_layer(self, init: Initializer, index: int) -> Layer:
        """One layer; all are alike."""
        c = self.config
        norms = norms_of_each_head(init, c, eps=c.layer_norm_eps) if c.qk_layernorm else {}
        if not c.use_parallel_residual:
            return dense_layer(init, c, norm=partial(self.make_norm, init), bias=c.use_qkv_bias, **norms)
        return ParallelLayer(
            attention_norm=self.make_norm(init, c.hidden_size),
            attention=dense_attention(init, c, bias=c.use_qkv_bias, **norms),
            mlp=GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act),
        )
