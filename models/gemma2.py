"""Gemma 2: norms on both sides of each block, soft caps, every other layer with a sliding window."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.config import layer_pattern
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.gemma_family import GemmaConfig, GemmaLM
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP, POST_NORMS_LOAD_MAP

load_map = LLAMA_LOAD_MAP | POST_NORMS_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(GemmaConfig):
    """Gemma 2's configuration."""

    query_pre_attn_scalar: float = 256.0
    sliding_window: int | None = 4096
    attn_logit_softcapping: float | None = None

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the layers that slide, and the caps, which null turns off."""
        return super().derive(config) | {
            "layer_types": layer_pattern(config, 2),
            "attn_logit_softcapping": config.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": config.get("final_logit_softcapping", 30.0),
        }


class Model(GemmaLM[Config]):
    """Layers normalised before and after."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window only."""
        c = self.config
        return dense_layer(
            init,
            c,
            norm=partial(self.make_norm, init),
            post_norms=True,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            scale=c.query_pre_attn_scalar**-0.5,
            softcap=c.attn_logit_softcapping,
        )
