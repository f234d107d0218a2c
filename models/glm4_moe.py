"""GLM-4.5 and 4.6: Llama's layer with half of each head rotated, and experts chosen as DeepSeek-V3 does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.decoder import DecoderLayer
from models.layers.deepseek_moe import BalancedMoeConfig, balanced_mlp
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import EXPERTS_LOAD_MAP, LLAMA_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | QK_NORM_LOAD_MAP | EXPERTS_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(BalancedMoeConfig):
    """GLM-4-MoE's configuration."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the share of a head that rotates, where it is left out."""
        return super().derive({"partial_rotary_factor": 0.5} | dict(config))


class Model(CausalLM[Config]):
    """Pre-norm layers; the first ones are dense."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer, with experts or without."""
        c = self.config
        mlp = balanced_mlp(init, c, index, has_correction=True, score="sigmoid", group_score="best_two")
        return dense_layer(init, c, mlp=mlp, bias=c.attention_bias, qk_norm=c.use_qk_norm)
