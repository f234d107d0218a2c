"""Command R7B and A: Cohere's parallel layers, most with a window; those that see everything do not rotate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.cohere_family import CohereConfig, CohereLM
from models.layers.config import LayerTraits, layer_pattern
from models.layers.weight_map import LLAMA_LOAD_MAP

load_map = LLAMA_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(CohereConfig):
    """Command R7B's configuration."""

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the window and the layers that have it."""
        return super().derive(config) | {
            "sliding_window": config.get("sliding_window") or 4096,
            "layer_types": layer_pattern(config, config.get("sliding_window_pattern") or 4),
            "use_qk_norm": False,
        }

    def layer_traits(self) -> tuple[LayerTraits, ...]:
        """Traits of each layer, without a rotary table where there is no window."""
        return tuple(t if t.window else t._replace(rope=None) for t in super().layer_traits())


class Model(CohereLM[Config]):
    """Parallel layers."""
