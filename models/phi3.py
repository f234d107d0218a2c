"""Phi-3 and Phi-4: Llama's layer with q, k, v and gate, up fused in the checkpoint, and longrope."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import FUSED_GATE_UP_LOAD_MAP, LLAMA_LOAD_MAP, transposed

load_map = {
    **LLAMA_LOAD_MAP,
    **FUSED_GATE_UP_LOAD_MAP,
    "layers.*.attention.qkv.weight": transposed("model.layers.*.self_attn.qkv_proj.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """Phi-3's configuration; a window holds for every layer."""

    rms_norm_eps: float = 1e-5

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the rotation under its later name: early checkpoints called longrope "yarn"."""
        values: dict[str, Any] = super().derive(config)
        values["layer_types"] = ()
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if "yarn" in (scaling.get("rope_type"), scaling.get("type")) and scaling.get("long_factor"):
            values["rope_parameters"] = replace(values["rope_parameters"], rope_type="longrope")
        return values


class Model(CausalLM[Config]):
    """Pre-norm layers without biases."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; all are alike."""
        return dense_layer(init, self.config)
