"""GLM-4: norms on both sides of each block, half of each head rotated in neighbouring pairs, gate and up fused."""

from models.glm import Config as Config
from models.layers.causal_lm import CausalLM
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import FUSED_GATE_UP_LOAD_MAP, LLAMA_LOAD_MAP, stored

load_map = {
    **LLAMA_LOAD_MAP,
    **FUSED_GATE_UP_LOAD_MAP,
    "layers.*.attention_post_norm.weight": stored("model.layers.*.post_self_attn_layernorm.weight"),
    "layers.*.mlp_post_norm.weight": stored("model.layers.*.post_mlp_layernorm.weight"),
}


class Model(CausalLM[Config]):
    """Layers normalised before and after."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        return dense_layer(init, self.config, post_norms=True, bias=self.config.attention_bias, interleaved_rope=True)
