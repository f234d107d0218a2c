"""Command R: Cohere's parallel layers, all with full attention."""

from dataclasses import dataclass

from models.layers.cohere_family import CohereConfig, CohereLM
from models.layers.weight_map import LLAMA_LOAD_MAP, QK_NORM_LOAD_MAP

load_map = LLAMA_LOAD_MAP | QK_NORM_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(CohereConfig):
    """Command R's configuration."""


class Model(CohereLM[Config]):
    """Parallel layers."""
