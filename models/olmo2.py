"""OLMo 2: norms after each block instead of before, and over all query heads and all key heads together."""

from dataclasses import dataclass

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.initializer import Initializer
from models.layers.olmo_family import olmo_layer
from models.layers.weight_map import LLAMA_LOAD_MAP, POST_NORMS_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | POST_NORMS_LOAD_MAP | QK_NORM_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """OLMo 2's configuration."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


class Model(CausalLM[Config]):
    """Post-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        return olmo_layer(init, self.config, bias=self.config.attention_bias)
