"""Falcon: parallel blocks, q, k and v fused by kv head; the 7B has one kv head and one norm, later ones two norms."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.config import refuse, renamed
from models.layers.decoder import Layer
from models.layers.dense_layer import dense_attention, dense_layer
from models.layers.initializer import Initializer
from models.layers.layer_norm_lm import LayerNormConfig, LayerNormLM
from models.layers.mlp import PlainMLP
from models.layers.parallel_layer import ParallelLayer
from models.layers.weight_map import Source, bias_lines, dealt, stored, transposed

WEIGHTS: dict[str, Source] = {
    "embedding.weight": stored("transformer.word_embeddings.weight"),
    "layers.*.attention_norm.weight": stored(
        "transformer.h.*.input_layernorm.weight", otherwise="transformer.h.*.ln_attn.weight"
    ),
    "layers.*.attention.qkv.weight": dealt("transformer.h.*.self_attention.query_key_value.weight", is_matrix=True),
    "layers.*.attention.out.weight": transposed("transformer.h.*.self_attention.dense.weight"),
    "layers.*.mlp_norm.weight": stored(
        "transformer.h.*.post_attention_layernorm.weight", otherwise="transformer.h.*.ln_mlp.weight"
    ),
    "layers.*.mlp.up.weight": transposed("transformer.h.*.mlp.dense_h_to_4h.weight"),
    "layers.*.mlp.down.weight": transposed("transformer.h.*.mlp.dense_4h_to_h.weight"),
    "norm.weight": stored("transformer.ln_f.weight"),
    "head.weight": transposed("lm_head.weight"),
}
load_map = WEIGHTS | bias_lines(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Config(LayerNormConfig):
    """Falcon's configuration; `bias` is the matrices'."""

    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    bias: bool = False
    new_decoder_architecture: bool = False
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int = 1

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds sizes under the names used here, and how many kv heads and norms the two architectures have."""
        refuse(config, alibi=False)
        is_new = bool(config.get("new_decoder_architecture"))
        num_heads = config.get("num_attention_heads")
        num_kv_heads = (config.get("num_kv_heads") or num_heads) if is_new else num_heads
        if not is_new and config.get("multi_query", True):
            num_kv_heads = 1
        values = {
            "num_key_value_heads": num_kv_heads,
            "intermediate_size": config.get("ffn_hidden_size") or 4 * config.get("hidden_size", 0),
            "num_ln_in_parallel_attn": config.get("num_ln_in_parallel_attn") or (2 if is_new else 1),
            "max_position_embeddings": config.get("max_position_embeddings") or 2048,
            **renamed(config, layer_norm_eps="layer_norm_epsilon", hidden_act="activation"),
        }
        return super().derive({**config, **values}) | values


class Model(LayerNormLM[Config]):
    """Layers parallel or, in some checkpoints, in a row."""

    def make_layer(self, init: Initializer, index: int) -> Layer:
        """One layer; all are alike."""
        c = self.config
        mlp = PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=c.bias)
        if not (c.parallel_attn or c.new_decoder_architecture):
            return dense_layer(init, c, norm=partial(self.make_norm, init), mlp=mlp, bias=c.bias, out_bias=c.bias)
        has_two_norms = c.new_decoder_architecture and c.num_ln_in_parallel_attn == 2
        return ParallelLayer(
            attention_norm=self.make_norm(init, c.hidden_size),
            attention=dense_attention(init, c, bias=c.bias, out_bias=c.bias),
            mlp_norm=self.make_norm(init, c.hidden_size) if has_two_norms else None,
            mlp=mlp,
        )
