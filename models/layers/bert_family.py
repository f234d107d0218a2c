"""What BERT and RoBERTa share: post-norm layers, learned positions, a table of text types, a tanh head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from models.layers.attention import Attention
from models.layers.config import LayerTraits, refuse
from models.layers.embedding import Embedding
from models.layers.encoder import Encoder, EncoderConfig, PostNormLayer
from models.layers.initializer import Initializer
from models.layers.mlp import PlainMLP
from models.layers.norm import LayerNorm
from models.layers.pooling import ClassificationHead
from models.layers.rope import RopeFrequencies
from models.layers.weight_map import Source, bias_lines, stored, transposed


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """The common part of the configurations."""

    hidden_act: str = "gelu"
    type_vocab_size: int = 2

    @classmethod
    def derive(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses relative positions, cross-attention and decoding."""
        refuse(config, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        return super().derive(config)

    def layer_traits(self) -> tuple[LayerTraits, ...]:
        """Traits of layers that see everything and rotate nothing."""
        return (LayerTraits(rope=None),) * self.num_hidden_layers

    def rope_frequencies(self, max_model_len: int | None) -> tuple[RopeFrequencies, ...]:
        """None."""
        return ()


BertConfigT = TypeVar("BertConfigT", bound=BertConfig)


def bert_load_map(prefix: str) -> dict[str, Source]:
    """The tensors of the layers and embeddings, under the model's name in the checkpoint."""
    embeddings, layer = f"{prefix}.embeddings", f"{prefix}.encoder.layer.*"
    weights = {
        "layers.*.attention.qkv.weight": transposed(
            f"{layer}.attention.self.query.weight",
            f"{layer}.attention.self.key.weight",
            f"{layer}.attention.self.value.weight",
        ),
        "layers.*.attention.out.weight": transposed(f"{layer}.attention.output.dense.weight"),
        "layers.*.attention_norm.weight": stored(f"{layer}.attention.output.LayerNorm.weight"),
        "layers.*.mlp.up.weight": transposed(f"{layer}.intermediate.dense.weight"),
        "layers.*.mlp.down.weight": transposed(f"{layer}.output.dense.weight"),
        "layers.*.mlp_norm.weight": stored(f"{layer}.output.LayerNorm.weight"),
    }
    tables = {
        "embedding.weight": stored(f"{embeddings}.word_embeddings.weight"),
        "positions.weight": stored(f"{embeddings}.position_embeddings.weight"),
        "token_types.weight": stored(f"{embeddings}.token_type_embeddings.weight"),
        "embedding_norm.weight": stored(f"{embeddings}.LayerNorm.weight"),
        "embedding_norm.bias": stored(f"{embeddings}.LayerNorm.bias"),
    }
    return tables | weights | bias_lines(weights)


def tanh_head_load_map(dense: str, out: str) -> dict[str, Source]:
    """The tensors of the head: `dense` and `out` are its matrices' names."""
    return {
        "classifier.dense.weight": transposed(f"{dense}.weight"),
        "classifier.dense.bias": stored(f"{dense}.bias"),
        "classifier.out.weight": transposed(f"{out}.weight"),
        "classifier.out.bias": stored(f"{out}.bias"),
    }


class BertEncoder(Encoder[BertConfigT]):
    """Post-norm layers with a plain MLP."""

    def make_norm(self, init: Initializer, size: int) -> LayerNorm:
        """A LayerNorm with bias."""
        return LayerNorm(init, size, eps=self.config.layer_norm_eps)

    def make_positions(self, init: Initializer) -> Embedding:
        """A row a position, after those that no token takes."""
        num_rows = self.config.max_position_embeddings + self.position_offset
        return Embedding(init, num_rows, self.config.hidden_size, axis=None)

    def make_token_types(self, init: Initializer) -> Embedding:
        """A row a type; RoBERTa has one only."""
        return Embedding(init, self.config.type_vocab_size, self.config.hidden_size, axis=None)

    def make_layer(self, init: Initializer, index: int) -> PostNormLayer:
        """One layer; all are alike."""
        c = self.config
        heads = c.num_attention_heads
        return PostNormLayer(
            attention=Attention(init, c.hidden_size, heads, heads, c.head_dim, bias=True, out_bias=True),
            attention_norm=self.make_norm(init, c.hidden_size),
            mlp=PlainMLP(init, c.hidden_size, c.intermediate_size, act=c.hidden_act, bias=True),
            mlp_norm=self.make_norm(init, c.hidden_size),
        )

    def make_classifier(self, init: Initializer, num_labels: int) -> ClassificationHead:
        """A tanh layer on the first token, then the classes."""
        return ClassificationHead(init, self.config.hidden_size, num_labels, bias=True, act="tanh")
