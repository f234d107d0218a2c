"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, many small experts, and one for all tokens behind a gate of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.linear import Linear
from models.layers.mlp import GatedMLP
from models.layers.qwen_moe_family import QwenMoeConfig, qwen_mlp
from models.layers.weight_map import EXPERTS_LOAD_MAP, LLAMA_LOAD_MAP, transposed

load_map = {
    **LLAMA_LOAD_MAP,
    **EXPERTS_LOAD_MAP,
    "layers.*.mlp.shared.gate.weight": transposed("model.layers.*.mlp.shared_expert.gate_proj.weight"),
    "layers.*.mlp.shared.up.weight": transposed("model.layers.*.mlp.shared_expert.up_proj.weight"),
    "layers.*.mlp.shared.down.weight": transposed("model.layers.*.mlp.shared_expert.down_proj.weight"),
    "layers.*.mlp.shared_gate.weight": transposed("model.layers.*.mlp.shared_expert_gate.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Config(QwenMoeConfig):
    """Qwen2-MoE's configuration."""

    shared_expert_intermediate_size: int = 5632
    qkv_bias: bool = True

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the window, if it is in use: every other one of the lower layers has it."""
        values = super().derive(config)
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        values["sliding_window"] = window
        if config.get("layer_types") is None:
            first, num_layers = config.get("max_window_layers", 28), config.get("num_hidden_layers", 0)
            slides = [window is not None and i % 2 == 0 and i < first for i in range(num_layers)]
            values["layer_types"] = tuple("sliding_attention" if own else "full_attention" for own in slides)
        return values


class Model(CausalLM[Config]):
    """Pre-norm layers with q, k and v biases."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer, with experts or without."""
        c = self.config
        shared: dict[str, Any] = {}
        if c.has_experts(index):
            shared["shared"] = GatedMLP(init, c.hidden_size, c.shared_expert_intermediate_size, act=c.hidden_act)
            shared["shared_gate"] = Linear(init, c.hidden_size, 1, ("embed", None))
        return dense_layer(init, c, mlp=qwen_mlp(init, c, index, **shared), bias=c.qkv_bias)
