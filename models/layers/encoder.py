"""An encoder: token table, bidirectional layers, and perhaps a head that names classes. It caches nothing."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.inputs import Batch, WholePrompts
from models.layers.attention import Attention
from models.layers.config import DecoderConfig
from models.layers.decoder import Layer, LayerExecution, arrange_layers, run_layers
from models.layers.embedding import Embedding
from models.layers.initializer import Initializer
from models.layers.pooling import ClassificationHead, Pooling
from models.layers.rope import RopeTable, rope_table


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """A configuration of a model that sees both ways."""

    is_causal: bool = False
    layer_norm_eps: float = 1e-12
    classifier_pooling: Pooling = "cls"
    """Which token's output the classification head reads."""


EncoderConfigT = TypeVar("EncoderConfigT", bound=EncoderConfig)


class PostNormLayer(nnx.Module):
    """Attention and a feed-forward block, each normalised together with the stream that it was added to."""

    def __init__(
        self, *, attention: Attention, attention_norm: nnx.Module, mlp: nnx.Module, mlp_norm: nnx.Module
    ) -> None:
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm = mlp, mlp_norm

    def __call__(
        self,
        x: Float[Array, "T D"],
        cache: Any,
        layer: int | Int32[Array, ""],
        rope: RopeTable | None,
        window: int | Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], Any]:
        """The stream after the layer, and what stands in the place of a cache."""
        branch, cache = self.attention(x, cache, layer, rope, window)
        x = self.attention_norm(x + branch)
        return self.mlp_norm(x + self.mlp(x)), cache


class Encoder(nnx.Module, Generic[EncoderConfigT]):
    """What a family of encoders fills in: its layers, its embeddings' extras, its norms, its head."""

    position_offset = 0
    """Row of the table of learned positions that the first token takes."""

    def __init__(
        self,
        config: EncoderConfigT,
        *,
        dtype: Any = jnp.float32,
        layer_execution: LayerExecution = "unrolled",
        rngs: nnx.Rngs,
        max_model_len: int | None = None,
        tensor_shards: int = 1,
        num_labels: int = 0,
    ) -> None:
        """Parameters with random values; with `num_labels`, a head for so many classes too.

        With `tensor_shards`, heads and feed-forward sizes are padded to divide among so many devices.
        """
        init = Initializer(dtype, rngs, tensor_shards)
        self.config = config
        self.max_model_len = max_model_len
        self.embedding = Embedding(init, config.vocab_size, config.hidden_size)
        self.positions = self.make_positions(init)
        self.token_types = self.make_token_types(init)
        self.embedding_norm = self.make_norm(init, config.hidden_size)
        layers = [self.make_layer(init, index) for index in range(config.num_hidden_layers)]
        self.layers, self.layer_counts = arrange_layers(layers, layer_execution)
        self.norm = self.make_final_norm(init)
        self.classifier = self.make_classifier(init, num_labels) if num_labels else None

    def make_layer(self, init: Initializer, index: int) -> Layer:
        """Layer `index` of the family."""
        raise NotImplementedError

    def make_norm(self, init: Initializer, size: int) -> nnx.Module:
        """A norm of the family's kind."""
        raise NotImplementedError

    def make_classifier(self, init: Initializer, num_labels: int) -> ClassificationHead:
        """The head of the family's `ForSequenceClassification`."""
        raise NotImplementedError

    def make_positions(self, init: Initializer) -> Embedding | None:
        """A table of learned positions, in the families that have one."""
        return None

    def make_token_types(self, init: Initializer) -> Embedding | None:
        """A table with a row for each of the texts of a pair, in the families that have one."""
        return None

    def make_final_norm(self, init: Initializer) -> nnx.Module | None:
        """The norm after the last layer, in the families whose layers do not end in one."""
        return None

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """What enters the first layer."""
        x = self.embedding(batch.token_ids)
        if self.token_types is not None:
            types = jnp.zeros_like(batch.token_ids) if batch.token_types is None else batch.token_types
            x = x + self.token_types(types)
        if self.positions is not None:
            x = x + self.positions(batch.positions + self.position_offset)
        return self.embedding_norm(x)  # type: ignore[operator]

    def __call__(self, batch: Batch, cache: WholePrompts) -> tuple[Float[Array, "T D"], WholePrompts]:
        """The output of the last layer for each token."""
        tables = [rope_table(f, batch.positions) for f in self.config.rope_frequencies(self.max_model_len)]
        held: Any = cache
        x, held = run_layers(
            self.layers, self.layer_counts, self.config.layer_traits(), self.embed(batch), held, tables
        )
        return x if self.norm is None else self.norm(x), held  # type: ignore[operator]
