"""What Cohere's Command models share: parallel layers, LayerNorms without bias, pairs of neighbours rotated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.dense_layer import dense_attention
from models.layers.head_norms import norms_of_each_head
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.norm import LayerNorm
from models.layers.parallel_layer import ParallelLayer


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """The common part of the configurations."""

    tie_word_embeddings: bool = True
    attention_bias: bool = False
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    use_qk_norm: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out what transformers does not read for the first family."""
        return super().derive(config) | {"sliding_window": None, "layer_types": ()}


CohereConfigT = TypeVar("CohereConfigT", bound=CohereConfig)


class CohereLM(CausalLM[CohereConfigT]):
    """The common part of the models."""

    def make_norm(self, init: Initializer, size: int) -> LayerNorm:
        """A LayerNorm without bias."""
        return LayerNorm(init, size, eps=self.config.layer_norm_eps, bias=False)

    def make_layer(self, init: Initializer, index: int) -> ParallelLayer:
        """One layer; attention and MLP share a norm."""
        c = self.config
        norms = norms_of_each_head(init, c, eps=c.layer_norm_eps) if c.use_qk_norm else {}
        bias = c.attention_bias
        return ParallelLayer(
            attention_norm=self.make_norm(init, c.hidden_size),
            attention=dense_attention(init, c, bias=bias, out_bias=bias, interleaved_rope=True, **norms),
            mlp=GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act),
        )
