"""OPT: learned positions from row two on, LayerNorms, a plain ReLU MLP."""

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
    "embedding.weight": stored("model.decoder.embed_tokens.weight"),
    "positions.weight": stored("model.decoder.embed_positions.weight"),
    "layers.*.attention_norm.weight": stored("model.decoder.layers.*.self_attn_layer_norm.weight"),
    "layers.*.attention.qkv.weight": transposed(
        "model.decoder.layers.*.self_attn.q_proj.weight",
        "model.decoder.layers.*.self_attn.k_proj.weight",
        "model.decoder.layers.*.self_attn.v_proj.weight",
    ),
    "layers.*.attention.out.weight": transposed("model.decoder.layers.*.self_attn.out_proj.weight"),
    "layers.*.mlp_norm.weight": stored("model.decoder.layers.*.final_layer_norm.weight"),
    "layers.*.mlp.up.weight": transposed("model.decoder.layers.*.fc1.weight"),
    "layers.*.mlp.down.weight": transposed("model.decoder.layers.*.fc2.weight"),
    "norm.weight": stored("model.decoder.final_layer_norm.weight"),
    "head.weight": transposed("lm_head.weight"),
}
load_map = WEIGHTS | bias_lines(WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Config(LearnedPositionConfig):
    """OPT's configuration."""

    hidden_act: str = "relu"
    tie_word_embeddings: bool = True
    enable_bias: bool = True

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds sizes under the names used here; the 350M, whose norms and widths are its own, is refused."""
        refuse(
            config,
            do_layer_norm_before=True,
            layer_norm_elementwise_affine=True,
            _remove_final_layer_norm=False,
            word_embed_proj_dim=config.get("hidden_size"),
        )
        values = renamed(
            config,
            intermediate_size="ffn_dim",
            num_key_value_heads="num_attention_heads",
            hidden_act="activation_function",
        )
        return super().derive({**config, **values}) | values


class Model(LayerNormLM[Config]):
    """Pre-norm layers with a plain MLP."""

    position_offset = 2

    def make_positions(self, init: Initializer) -> Embedding:
        """A row a position, after two that no token takes."""
        num_rows = self.config.max_position_embeddings + self.position_offset
        return Embedding(init, num_rows, self.config.hidden_size, axis=None)

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        bias = c.enable_bias
        mlp = PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=bias)
        return dense_layer(init, c, norm=partial(self.make_norm, init), mlp=mlp, bias=bias, out_bias=bias)
