"""What DeepSeek-V2 and V3 share: latent attention, and the scale that a stretched rotation asks for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from models.inputs import CacheSpec
from models.layers.causal_lm import CausalLM
from models.layers.config import refuse
from models.layers.decoder import DecoderLayer
from models.layers.deepseek_moe import BalancedMoeConfig
from models.layers.initializer import Initializer
from models.layers.latent_attention import LatentAttention
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.weight_map import EXPERTS_LOAD_MAP, LLAMA_LOAD_MAP, stored, transposed

ATTENTION = "model.layers.*.self_attn"
DEEPSEEK_LOAD_MAP = {
    **LLAMA_LOAD_MAP,
    **EXPERTS_LOAD_MAP,
    "layers.*.attention.q_down.weight": transposed(f"{ATTENTION}.q_a_proj.weight"),
    "layers.*.attention.q_down.bias": stored(f"{ATTENTION}.q_a_proj.bias"),
    "layers.*.attention.q_norm.weight": stored(f"{ATTENTION}.q_a_layernorm.weight"),
    "layers.*.attention.q.weight": transposed(f"{ATTENTION}.q_b_proj.weight", otherwise=f"{ATTENTION}.q_proj.weight"),
    "layers.*.attention.kv_down.weight": transposed(f"{ATTENTION}.kv_a_proj_with_mqa.weight"),
    "layers.*.attention.kv_down.bias": stored(f"{ATTENTION}.kv_a_proj_with_mqa.bias"),
    "layers.*.attention.kv_norm.weight": stored(f"{ATTENTION}.kv_a_layernorm.weight"),
    "layers.*.attention.key_up": stored(f"{ATTENTION}.kv_b_proj.weight"),
    "layers.*.attention.value_up": stored(f"{ATTENTION}.kv_b_proj.weight"),
}


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(BalancedMoeConfig):
    """The common part of the configurations; `head_dim` is the rotated part of a head."""

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    attention_bias: bool = False
    rope_interleave: bool = True

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds what the rotation takes for a head."""
        refuse(config, moe_layer_freq=1)
        return super().derive(config) | {"head_dim": config.get("qk_rope_head_dim") or 64}

    @property
    def attention_scale(self) -> float:
        """What logits are multiplied by: a stretched rotation (YaRN) sharpens them by its magnitude, twice."""
        scale, rope = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5, self.rope_parameters
        if rope.rope_type != "default" and rope.mscale_all_dim and rope.factor and rope.factor > 1:
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
        return scale


DeepseekConfigT = TypeVar("DeepseekConfigT", bound=DeepseekConfig)


class DeepseekLM(CausalLM[DeepseekConfigT]):
    """The common part of the models."""

    @property
    def cache_spec(self) -> CacheSpec:
        """One latent and one rotated key a token and layer."""
        c = self.config
        head_dim = c.kv_lora_rank + c.qk_rope_head_dim
        return CacheSpec(num_layers=c.num_hidden_layers, num_kv_heads=1, head_dim=head_dim, is_latent=True)

    def latent_layer(self, init: Initializer, mlp: SparseMLP | GatedMLP) -> DecoderLayer:
        """Norm, latent attention, norm, feed-forward block."""
        c = self.config
        return DecoderLayer(
            attention_norm=self.make_norm(init, c.hidden_size),
            attention=LatentAttention(
                init,
                c.hidden_size,
                c.num_attention_heads,
                q_rank=c.q_lora_rank,
                kv_rank=c.kv_lora_rank,
                nope_dim=c.qk_nope_head_dim,
                rope_dim=c.qk_rope_head_dim,
                v_dim=c.v_head_dim,
                scale=c.attention_scale,
                bias=c.attention_bias,
                interleaved_rope=c.rope_interleave,
            ),
            mlp_norm=self.make_norm(init, c.hidden_size),
            mlp=mlp,
        )
