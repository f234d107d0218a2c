"""OLMo 3: OLMo 2's layer, three of four with a sliding window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig, layer_pattern, rope_by_layer_type
from models.layers.decoder import DecoderLayer
from models.layers.initializer import Initializer
from models.layers.olmo_family import olmo_layer
from models.layers.weight_map import LLAMA_LOAD_MAP, POST_NORMS_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | POST_NORMS_LOAD_MAP | QK_NORM_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """OLMo 3's configuration."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = 4096

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the layers that slide, and the rotations of both kinds."""
        theta = config.get("rope_theta") or 500000.0
        return super().derive({**config, "rope_parameters": None}) | {
            "layer_types": layer_pattern(config, 4),
            **rope_by_layer_type(config, theta=theta, local_theta=theta),
        }


class Model(CausalLM[Config]):
    """Post-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window and rotation only."""
        return olmo_layer(init, self.config, bias=self.config.attention_bias)
