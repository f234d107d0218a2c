"""What Gemma 1 to 3 share: norms stored less one, a tanh GELU, scaled embeddings, tied heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from models.layers.causal_lm import CausalLM
from models.layers.config import DecoderConfig
from models.layers.initializer import Initializer
from models.layers.norm import RMSNorm


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """The common part of the configurations."""

    tie_word_embeddings: bool = True
    attention_bias: bool = False

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the activation under its newer name; the first checkpoints said "gelu" and meant its approximation."""
        if config.get("use_bidirectional_attention"):
            raise ValueError("use_bidirectional_attention is not supported for this family: it is run causally.")
        act = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
        return super().derive(config) | {
            "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act,
            "embedding_multiplier": config.get("hidden_size", 0) ** 0.5,
            "head_dim": config.get("head_dim") or 256,
        }


GemmaConfigT = TypeVar("GemmaConfigT", bound=GemmaConfig)


class GemmaLM(CausalLM[GemmaConfigT]):
    """The common part of the models."""

    def make_norm(self, init: Initializer, size: int) -> RMSNorm:
        """A norm whose weights are stored less one."""
        return RMSNorm(init, size, eps=self.config.rms_norm_eps, offset=1.0)
