"""SmolLM3: Llama's layer, some of them without rotary embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig, LayerTraits
from models.layers.decoder import DecoderLayer
from models.layers.dense_layer import dense_layer
from models.layers.initializer import Initializer
from models.layers.weight_map import LLAMA_LOAD_MAP

load_map = LLAMA_LOAD_MAP


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """SmolLM3's configuration; `no_rope_layers` has 1 for each layer that DOES rotate."""

    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: tuple[int, ...]

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds which layers rotate and which have the window, where they are not listed."""
        values = super().derive({"rope_theta": 2000000.0} | dict(config))
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        rotates = config.get("no_rope_layers")
        if rotates is None:
            interval = config.get("no_rope_layer_interval", 4)
            rotates = [int((i + 1) % interval != 0) for i in range(config.get("num_hidden_layers", 0))]
        values |= {"sliding_window": window, "no_rope_layers": tuple(rotates)}
        if config.get("layer_types") is None:
            kinds = ("full_attention", "sliding_attention")
            values["layer_types"] = tuple(kinds[window is not None and not own] for own in rotates)
        return values

    def layer_traits(self) -> tuple[LayerTraits, ...]:
        """Traits of each layer, without a rotary table where there is no rotation."""
        traits = zip(super().layer_traits(), self.no_rope_layers, strict=True)
        return tuple(t if rotates else t._replace(rope=None) for t, rotates in traits)


class Model(CausalLM[Config]):
    """Pre-norm layers."""

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their rotation and window only."""
        c = self.config
        return dense_layer(init, c, bias=c.attention_bias, out_bias=c.attention_bias, mlp_bias=c.mlp_bias)
