"""Mixtral: Mistral's layer with eight experts a layer, of which each token takes two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.moe import Experts, Gated, Router, SparseMLP
from models.layers.weight_map import LLAMA_LOAD_MAP, transposed

load_map = {
    **LLAMA_LOAD_MAP,
    "layers.*.mlp.router.weight": transposed("model.layers.*.block_sparse_moe.gate.weight"),
    "layers.*.mlp.experts.gate": transposed("model.layers.*.block_sparse_moe.experts.*.w1.weight"),
    "layers.*.mlp.experts.up": transposed("model.layers.*.block_sparse_moe.experts.*.w3.weight"),
    "layers.*.mlp.experts.down": transposed("model.layers.*.block_sparse_moe.experts.*.w2.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """Mixtral's configuration; a window, where there is one, holds for every layer."""

    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the rotation's base, where it is left out."""
        return super().derive({"rope_theta": 1e6} | dict(config)) | {"layer_types": ()}


class Model(CausalLM[Config]):
    """Pre-norm layers without biases."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        c = self.config
        router = Router(init, c.hidden_size, c.num_local_experts, c.num_experts_per_tok, renormalise=True)
        experts = Experts(init, c.hidden_size, c.intermediate_size, c.num_local_experts, gating=Gated(c.hidden_act))
        return dense_layer(init, c, mlp=SparseMLP(router=router, experts=experts))
