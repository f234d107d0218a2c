"""gpt-oss: attention with sinks, every other layer with a window, experts with a clamped SwiGLU, biases everywhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.moe import Experts, Router, SparseMLP
from models.layers.weight_map import LLAMA_LOAD_MAP, stored, stored_share, transposed

EXPERTS = "model.layers.*.mlp.experts"
load_map = {
    **LLAMA_LOAD_MAP,
    "layers.*.attention.sinks": stored("model.layers.*.self_attn.sinks"),
    "layers.*.mlp.router.weight": transposed("model.layers.*.mlp.router.weight"),
    "layers.*.mlp.router.bias": stored("model.layers.*.mlp.router.bias"),
    "layers.*.mlp.experts.gate": stored_share(f"{EXPERTS}.gate_up_proj", 0, 2, is_interleaved=True),
    "layers.*.mlp.experts.up": stored_share(f"{EXPERTS}.gate_up_proj", 1, 2, is_interleaved=True),
    "layers.*.mlp.experts.down": stored(f"{EXPERTS}.down_proj"),
    "layers.*.mlp.experts.gate_bias": stored_share(f"{EXPERTS}.gate_up_proj_bias", 0, 2, is_interleaved=True),
    "layers.*.mlp.experts.up_bias": stored_share(f"{EXPERTS}.gate_up_proj_bias", 1, 2, is_interleaved=True),
    "layers.*.mlp.experts.down_bias": stored(f"{EXPERTS}.down_proj_bias"),
}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """gpt-oss's configuration."""

    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 128
    attention_bias: bool = True
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """The configuration; MXFP4 weights are made whole while they are loaded (`paxserve/loaders/mxfp4.py`)."""
        quantization = config.get("quantization_config") or {}
        is_mxfp4 = quantization.get("quant_method") == "mxfp4"
        return super().from_hf(dict(config) | {"quantization_config": None} if is_mxfp4 else config)

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the rotation and the layers that slide, where they are left out."""
        rope = {"rope_theta": 150000.0, "original_max_position_embeddings": 4096, "rope_parameters": YARN}
        given = config.get("rope_parameters") or config.get("rope_scaling")
        values = super().derive(dict(config) if given else rope | dict(config) | {"rope_parameters": YARN})
        if config.get("layer_types") is None:
            kinds = ("sliding_attention", "full_attention")
            values["layer_types"] = tuple(kinds[i % 2] for i in range(config.get("num_hidden_layers", 0)))
        return values


@dataclass(frozen=True)
class ClampedSwiglu:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, the gate bounded above and up on both sides."""

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "R F"], up: Float[Array, "R F"]) -> Float[Array, "R F"]:
        """What goes into the expert's second product."""
        gate = jnp.minimum(gate, self.limit)
        return (jnp.clip(up, -self.limit, self.limit) + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window only."""
        c = self.config
        router = Router(init, c.hidden_size, c.num_local_experts, c.num_experts_per_tok, renormalise=True, bias=True)
        gating = ClampedSwiglu(c.swiglu_alpha, c.swiglu_limit)
        experts = Experts(init, c.hidden_size, c.intermediate_size, c.num_local_experts, gating=gating, bias=True)
        mlp = SparseMLP(router=router, experts=experts)
        return dense_layer(init, c, mlp=mlp, bias=c.attention_bias, out_bias=c.attention_bias, sinks=True)
