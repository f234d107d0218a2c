"""Gemma 3, text only: Gemma 2's layer with normalised heads instead of a cap, and two rotations."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.layers.config import layer_pattern, rope_by_layer_type
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.gemma_family import GemmaConfig, GemmaLM
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP, POST_NORMS_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | POST_NORMS_LOAD_MAP | QK_NORM_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(GemmaConfig):
    """Gemma 3's configuration."""

    query_pre_attn_scalar: float = 256.0
    sliding_window: int | None = 4096
    attn_logit_softcapping: float | None = None

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the layers that slide, and both rotations where they are given in the older keys."""
        local_theta = config.get("rope_local_base_freq") or 1e4
        values = super().derive({**config, "rope_parameters": None, "use_bidirectional_attention": None})
        if config.get("use_bidirectional_attention"):
            # EmbeddingGemma's window spans both sides.
            values |= {"is_causal": False, "sliding_window": (config.get("sliding_window") or 4096) // 2 + 1}
        return values | {
            "layer_types": layer_pattern(config, config.get("sliding_window_pattern") or 6),
            **rope_by_layer_type(config, theta=1e6, local_theta=local_theta),
        }


class Model(GemmaLM[Config]):
    """Layers normalised before and after, and their heads too."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window and rotation only."""
        c = self.config
        return dense_layer(
            init,
            c,
            norm=partial(self.make_norm, init),
            post_norms=True,
            qk_norm=True,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            scale=c.query_pre_attn_scalar**-0.5,
            softcap=c.attn_logit_softcapping,
        )
