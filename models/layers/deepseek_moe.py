"""The feed-forward blocks of DeepSeek and GLM: dense in the first layers, then shared and routed experts."""

from dataclasses import dataclass
from typing import Any

from models.layers.config import DecoderConfig
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.moe import Experts, Gated, Router, SparseMLP


@dataclass(frozen=True, kw_only=True)
class BalancedMoeConfig(DecoderConfig):
    """The common part of the configurations."""

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    """Layers below this one are dense."""
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    num_nextn_predict_layers: int = 0
    """Layers that predict further tokens, stored behind the model's own; they are not loaded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"n_routed_experts must be a multiple of n_group, and topk_group at most n_group, got "
                f"{self.n_routed_experts}, {self.n_group}, {self.topk_group}."
            )

    def unused_tensors(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that belong to no layer of the model."""
        first = self.num_hidden_layers
        return tuple(f"model.layers.{first + i}." for i in range(self.num_nextn_predict_layers))


def balanced_mlp(init: Initializer, config: BalancedMoeConfig, index: int, **routing: Any) -> SparseMLP | GatedMLP:
    """The feed-forward block of layer `index`; `routing` are options of `Router`."""
    c = config
    if index < c.first_k_dense_replace:
        return GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act)
    router = Router(
        init,
        c.hidden_size,
        c.n_routed_experts,
        c.num_experts_per_tok,
        renormalise=c.norm_topk_prob,
        num_groups=c.n_group,
        top_groups=c.topk_group,
        scaling=c.routed_scaling_factor,
        **routing,
    )
    experts = Experts(init, c.hidden_size, c.moe_intermediate_size, c.n_routed_experts, gating=Gated(c.hidden_act))
    shared = None
    if c.n_shared_experts:
        shared = GatedMLP(init, c.hidden_size, c.moe_intermediate_size * c.n_shared_experts, act=c.hidden_act)
    return SparseMLP(router=router, experts=experts, shared=shared)
