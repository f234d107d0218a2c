"""Granite 3 MoE: Granite's layer with its multipliers, and experts stored in one tensor each of gate, up and down."""

from dataclasses import dataclass

from models import granite
from models.layers.causal_lm import CausalLM
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.moe import Experts, Gated, Router, SparseMLP
from models.layers.weight_map import LLAMA_LOAD_MAP, transposed, transposed_share

load_map = {
    **LLAMA_LOAD_MAP,
    "layers.*.mlp.router.weight": transposed("model.layers.*.block_sparse_moe.router.layer.weight"),
    "layers.*.mlp.experts.gate": transposed_share("model.layers.*.block_sparse_moe.input_linear.weight", 0, 2),
    "layers.*.mlp.experts.up": transposed_share("model.layers.*.block_sparse_moe.input_linear.weight", 1, 2),
    "layers.*.mlp.experts.down": transposed("model.layers.*.block_sparse_moe.output_linear.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Config(granite.Config):
    """Granite's configuration with experts."""

    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        router = Router(init, c.hidden_size, c.num_local_experts, c.num_experts_per_tok, renormalise=True)
        experts = Experts(init, c.hidden_size, c.intermediate_size, c.num_local_experts, gating=Gated(c.hidden_act))
        return dense_layer(
            init,
            c,
            mlp=SparseMLP(router=router, experts=experts),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            scale=c.attention_multiplier,
            residual_multiplier=c.residual_multiplier,
        )
