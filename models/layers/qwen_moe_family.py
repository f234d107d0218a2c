"""What Qwen2-MoE and Qwen3-MoE share: which layers have experts, and how these are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.config import DecoderConfig, renamed
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.moe import Experts, Gated, Router, SparseMLP


@dataclass(frozen=True, kw_only=True)
class QwenMoeConfig(DecoderConfig):
    """The common part of the configurations."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = 0

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the number of experts under the name that the hub's checkpoints use."""
        return super().derive(config) | renamed(config, num_experts="num_local_experts")

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has experts; the others have a dense MLP of `intermediate_size`."""
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


def qwen_mlp(init: Initializer, config: QwenMoeConfig, index: int, **shared: Any) -> SparseMLP | GatedMLP:
    """The feed-forward block of layer `index`; `shared` goes to its `SparseMLP`."""
    c = config
    if not c.has_experts(index):
        return GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act)
    router = Router(init, c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalise=c.norm_topk_prob)
    experts = Experts(init, c.hidden_size, c.moe_intermediate_size, c.num_experts, gating=Gated(c.hidden_act))
    return SparseMLP(router=router, experts=experts, **shared)
