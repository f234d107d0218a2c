"""DeepSeek-V3 and R1: latent attention, and experts chosen by sigmoids with a balancing term, from the best groups."""

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
    """DeepSeek-V3's configuration."""

    first_k_dense_replace: int = 3
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses other ways to choose experts."""
        refuse(config, scoring_func="sigmoid", topk_method="noaux_tc")
        return super().derive(config)


class Model(DeepseekLM[Config]):
    """Pre-norm layers; the first ones are dense."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer, with experts or without."""
        mlp = balanced_mlp(init, self.config, index, has_correction=True, score="sigmoid", group_score="best_two")
        return self.latent_layer(init, mlp)
