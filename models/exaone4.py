"""EXAONE 4: norms after each block and on each head; with a window, the layers that see everything do not rotate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig, LayerTraits, layer_pattern
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP, POST_NORMS_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | POST_NORMS_LOAD_MAP | QK_NORM_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """EXAONE 4's configuration."""

    rms_norm_eps: float = 1e-5

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the window (null turns it off) and the layers that have it; "LLLG" is a pattern of four."""
        window = config.get("sliding_window", 4096)
        pattern = config.get("sliding_window_pattern", 4)
        period = len(pattern) if isinstance(pattern, str) else pattern
        kinds = () if window is None else layer_pattern(config, period or 1)
        return super().derive(config) | {"sliding_window": window, "layer_types": kinds}

    def layer_traits(self) -> tuple[LayerTraits, ...]:
        """Traits of each layer, without a rotary table for full layers among sliding ones."""
        traits = super().layer_traits()
        if self.sliding_window is None:
            return traits
        return tuple(t if t.window else t._replace(rope=None) for t in traits)


class Model(CausalLM[Config]):
    """Post-norm layers with normalised heads."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window and rotation only."""
        return dense_layer(init, self.config, pre_norms=False, post_norms=True, qk_norm=True)
