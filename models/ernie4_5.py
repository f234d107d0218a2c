"""ERNIE 4.5, dense: Llama's layer with neighbouring pairs rotated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP

load_map = LLAMA_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """ERNIE 4.5's configuration."""

    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the head size that an absent key stands for."""
        return super().derive({"head_dim": 128, **config}) | {"head_dim": config.get("head_dim", 128)}


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        bias = self.config.use_bias
        return dense_layer(init, self.config, bias=bias, out_bias=bias, mlp_bias=bias, interleaved_rope=True)
