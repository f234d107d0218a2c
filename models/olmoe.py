"""OLMoE: Llama's layer with norms over all query and all key heads, and 64 experts, of which each token takes eight."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig, refuse
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.head_norms import norms_of_all_heads
from models.layers.initializer import Initializer
from models.layers.moe import Experts, Gated, Router, SparseMLP
from models.layers.weight_map import EXPERTS_LOAD_MAP, LLAMA_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | QK_NORM_LOAD_MAP | EXPERTS_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """OLMoE's configuration."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses clipped heads, which no released checkpoint has."""
        refuse(config, clip_qkv=None)
        return super().derive(config)


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        router = Router(init, c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalise=c.norm_topk_prob)
        experts = Experts(init, c.hidden_size, c.intermediate_size, c.num_experts, gating=Gated(c.hidden_act))
        return dense_layer(
            init,
            c,
            mlp=SparseMLP(router=router, experts=experts),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            **norms_of_all_heads(init, c, eps=c.rms_norm_eps),
        )
