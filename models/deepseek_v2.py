"""DeepSeek-V2: latent attention, and experts chosen by softmax, in the larger model from the best groups only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.config import refuse
from models.layers.decoder import DecoderLayer
from models.layers.deepseek_family import DEEPSEEK_LOAD_MAP, DeepseekConfig, DeepseekLM
from models.layers.deepseek_moe import balanced_mlp
from models.layers.initializer import Initializer

load_map = DEEPSEEK_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DeepseekConfig):
    """DeepSeek-V2's configuration."""

    first_k_dense_replace: int = 0
    n_shared_experts: int = 2
    norm_topk_prob: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out the groups where `topk_method` does not look at them."""
        refuse(config, scoring_func="softmax", norm_topk_prob=False)
        values = super().derive(config)
        method = config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method must be greedy or group_limited_greedy, got {method!r}.")
        return values | ({"n_group": 1, "topk_group": 1} if method == "greedy" else {})


class Model(DeepseekLM[Config]):
    """Pre-norm layers; the first ones are dense."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer, with experts or without."""
        return self.latent_layer(init, balanced_mlp(init, self.config, index))
