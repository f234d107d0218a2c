"""ModernBERT: a pre-norm encoder with rotary positions, gated MLPs, and windows on all but every third layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from models.layers.attention import Attention
from models.layers.config import refuse, renamed, rope_by_layer_type
from models.layers.decoder import DecoderLayer
from models.layers.encoder import Encoder, EncoderConfig
from models.layers.initializer import Initializer
from models.layers.mlp import GatedMLP
from models.layers.norm import LayerNorm
from models.layers.pooling import ClassificationHead
from models.layers.weight_map import bias_lines, stored, transposed, transposed_share

LAYERS = {
    "layers.*.attention_norm.weight": stored("model.layers.*.attn_norm.weight"),
    "layers.*.attention.qkv.weight": transposed("model.layers.*.attn.Wqkv.weight"),
    "layers.*.attention.out.weight": transposed("model.layers.*.attn.Wo.weight"),
    "layers.*.mlp_norm.weight": stored("model.layers.*.mlp_norm.weight"),
    "layers.*.mlp.gate.weight": transposed_share("model.layers.*.mlp.Wi.weight", 0, 2),
    "layers.*.mlp.up.weight": transposed_share("model.layers.*.mlp.Wi.weight", 1, 2),
    "layers.*.mlp.down.weight": transposed("model.layers.*.mlp.Wo.weight"),
}
load_map = {
    "embedding.weight": stored("model.embeddings.tok_embeddings.weight"),
    "embedding_norm.weight": stored("model.embeddings.norm.weight"),
    "embedding_norm.bias": stored("model.embeddings.norm.bias"),
    "norm.weight": stored("model.final_norm.weight"),
    "norm.bias": stored("model.final_norm.bias"),
    "classifier.dense.weight": transposed("head.dense.weight"),
    "classifier.dense.bias": stored("head.dense.bias"),
    "classifier.norm.weight": stored("head.norm.weight"),
    "classifier.norm.bias": stored("head.norm.bias"),
    "classifier.out.weight": transposed("classifier.weight"),
    "classifier.out.bias": stored("classifier.bias"),
    **LAYERS,
    **bias_lines(LAYERS),
}


@dataclass(frozen=True, kw_only=True)
class Config(EncoderConfig):
    """ModernBERT's configuration."""

    hidden_act: str = "gelu"
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the layers that slide, their window as a distance that is not reached, and both rotations."""
        refuse(config, mlp_bias=False)
        period = config.get("global_attn_every_n_layers") or 3
        num_layers = config.get("num_hidden_layers", 0)
        # Layer 0 is full, and every `period`th after it.
        kinds = tuple("sliding_attention" if i % period else "full_attention" for i in range(num_layers))
        theta, local_theta = config.get("global_rope_theta") or 160_000.0, config.get("local_rope_theta") or 10_000.0
        values = super().derive({**config, "rope_parameters": None})
        values |= renamed(config, hidden_act="hidden_activation", layer_norm_eps="norm_eps")
        return values | {
            "layer_types": tuple(config.get("layer_types") or kinds),
            "sliding_window": config.get("local_attention", 128) // 2 + 1,
            **rope_by_layer_type(config, theta=theta, local_theta=local_theta),
        }

    def unused_tensors(self) -> tuple[str, ...]:
        """Beginnings of the names of the pretraining heads' tensors, which neither vectors nor classes need."""
        return ("head.", "decoder.")


class Model(Encoder[Config]):
    """Pre-norm layers, of which the first takes the normalised embeddings as they are."""

    def make_norm(self, init: Initializer, size: int) -> LayerNorm:
        """A LayerNorm, without bias in the published models."""
        return LayerNorm(init, size, eps=self.config.layer_norm_eps, bias=self.config.norm_bias)

    def make_final_norm(self, init: Initializer) -> nnx.Module:
        """A norm after the last layer."""
        return self.make_norm(init, self.config.hidden_size)

    def make_layer(self, init: Initializer, index: int) -> DecoderLayer:
        """One layer; they differ in their window and rotation, and the first has no norm before its attention."""
        c = self.config
        heads = c.num_attention_heads
        return DecoderLayer(
            attention_norm=self.make_norm(init, c.hidden_size) if index else None,
            attention=Attention(
                init, c.hidden_size, heads, heads, c.head_dim, bias=c.attention_bias, out_bias=c.attention_bias
            ),
            mlp_norm=self.make_norm(init, c.hidden_size),
            mlp=GatedMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=False),
        )

    def make_classifier(self, init: Initializer, num_labels: int) -> ClassificationHead:
        """A dense layer with activation and norm on the pooled tokens, then the classes."""
        c = self.config
        return ClassificationHead(
            init, c.hidden_size, num_labels, bias=True, act=c.classifier_activation, dense_bias=c.classifier_bias,
            norm=self.make_norm(init, c.hidden_size),
        )  # fmt: skip
