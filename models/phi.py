"""Phi-1, 1.5 and 2: parallel blocks on one LayerNorm, a plain MLP, biases everywhere, part of each head rotated."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.dense_layer import dense_attention
from models.layers.embedding import Head
from models.layers.initializer import Initializer
from models.layers.layer_norm_lm import LayerNormConfig, LayerNormLM
from models.layers.mlp import PlainMLP
from models.layers.parallel_layer import ParallelLayer
from models.layers.weight_map import LLAMA_LOAD_MAP, bias_lines, stored, transposed

WEIGHTS = LLAMA_LOAD_MAP | {
    "layers.*.attention.out.weight": transposed("model.layers.*.self_attn.dense.weight"),
    "layers.*.attention.q_norm.weight": stored("model.layers.*.self_attn.q_layernorm.weight"),
    "layers.*.attention.k_norm.weight": stored("model.layers.*.self_attn.k_layernorm.weight"),
    "layers.*.mlp.up.weight": transposed("model.layers.*.mlp.fc1.weight"),
    "layers.*.mlp.down.weight": transposed("model.layers.*.mlp.fc2.weight"),
    "norm.weight": stored("model.final_layernorm.weight"),
}
load_map = WEIGHTS | bias_lines(WEIGHTS) | {"head.bias": stored("lm_head.bias")}


@dataclass(frozen=True, kw_only=True)
class Config(LayerNormConfig):
    """Phi's configuration."""

    hidden_act: str = "gelu_new"
    qk_layernorm: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the share of a head that rotates, where it is left out."""
        if config.get("tie_word_embeddings"):
            raise ValueError("tie_word_embeddings is not supported for phi: its head has a bias of its own.")
        return super().derive({"partial_rotary_factor": 0.5, **config})


class Model(LayerNormLM[Config]):
    """Parallel layers."""

    def make_head(self, init: Initializer) -> Head:
        """The output matrix, with a bias."""
        return Head(init, self.config.hidden_size, self.config.vocab_size, bias=True)

    def make_layer(self, init: Initializer, index: int) -> ParallelLayer:
        """One layer; all are alike."""
        c = self.config
        head_norm = partial(self.make_norm, init) if c.qk_layernorm else None
        return ParallelLayer(
            attention_norm=self.make_norm(init, c.hidden_size),
            attention=dense_attention(init, c, head_norm=head_norm, bias=True, out_bias=True),
            mlp=PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=True),
        )
