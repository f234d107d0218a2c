"""GPT-2: learned positions, LayerNorms, a plain MLP, matrices stored [in, out]."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.config import refuse, renamed
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.embedding import Embedding
from models.layers.initializer import Initializer
from models.layers.layer_norm_lm import LayerNormLM, LearnedPositionConfig
from models.layers.mlp import PlainMLP
from models.layers.weight_map import bias_lines, stored, transposed

WEIGHTS = {
    "embedding.weight": stored("transformer.wte.weight"),
    "positions.weight": stored("transformer.wpe.weight"),
    "layers.*.attention_norm.weight": stored("transformer.h.*.ln_1.weight"),
    "layers.*.attention.qkv.weight": stored("transformer.h.*.attn.c_attn.weight"),
    "layers.*.attention.out.weight": stored("transformer.h.*.attn.c_proj.weight"),
    "layers.*.mlp_norm.weight": stored("transformer.h.*.ln_2.weight"),
    "layers.*.mlp.up.weight": stored("transformer.h.*.mlp.c_fc.weight"),
    "layers.*.mlp.down.weight": stored("transformer.h.*.mlp.c_proj.weight"),
    "norm.weight": stored("transformer.ln_f.weight"),
    "head.weight": transposed("lm_head.weight"),
}
load_map = WEIGHTS | bias_lines(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Config(LearnedPositionConfig):
    """GPT-2's configuration, under the names of later families."""

    hidden_act: str = "gelu_new"
    tie_word_embeddings: bool = True

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds every size under the name used here."""
        refuse(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
        values = renamed(
            config,
            hidden_size="n_embd",
            num_hidden_layers="n_layer",
            num_attention_heads="n_head",
            num_key_value_heads="n_head",
            max_position_embeddings="n_positions",
            hidden_act="activation_function",
            layer_norm_eps="layer_norm_epsilon",
        )
        values["intermediate_size"] = config.get("n_inner") or 4 * values.get("hidden_size", 0)
        return super().derive({**config, **values}) | values


class Model(LayerNormLM[Config]):
    """Pre-norm layers with a plain MLP."""

    def make_positions(self, init: Initializer) -> Embedding:
        """A row a position."""
        return Embedding(init, self.config.max_position_embeddings, self.config.hidden_size, axis=None)

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        mlp = PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=True)
        return dense_layer(init, c, norm=partial(self.make_norm, init), mlp=mlp, bias=True, out_bias=True)
