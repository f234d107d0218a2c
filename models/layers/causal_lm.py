"""A language model of decoder layers: what the engine calls, whatever the family."""

from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from models.inputs import Batch, CacheSpec, PagedKVCache
from models.layer_groups import Reach
from models.layers.config import DecoderConfig
from models.layers.decoder import Layer, LayerExecution, arrange_layers, run_layers
from models.layers.embedding import Embedding, Head
from models.layers.head_layout import HeadLayout
from models.layers.initializer import Initializer
from models.layers.norm import RMSNorm
from models.layers.pooling import ClassificationHead
from models.layers.rope import rope_table

ConfigT = TypeVar("ConfigT", bound=DecoderConfig)


class CausalLM(nnx.Module, Generic[ConfigT]):
    """Token table, decoder layers, final norm, head. A family says what its layers are in `make_layer`."""

    position_offset = 0
    """Row of the table of learned positions that the first token takes."""

    def __init__(
        self,
        config: ConfigT,
        *,
        dtype: Any = jnp.float32,
        layer_execution: LayerExecution = "unrolled",
        rngs: nnx.Rngs,
        max_model_len: int | None = None,
        tensor_shards: int = 1,
        num_labels: int | None = None,
    ) -> None:
        """Parameters with random values; under `nnx.eval_shape`, shapes only.

        `max_model_len` settles rotary schemes that depend on the length of sequences. With `tensor_shards`, heads,
        vocabulary and feed-forward sizes are padded to divide among so many devices. With `num_labels` the model has a
        head for so many classes (0: none at all) instead of the vocabulary's.
        """
        init = Initializer(dtype, rngs, tensor_shards)
        self.config = config
        self.tensor_shards = tensor_shards
        self.max_model_len = max_model_len
        self.embedding = Embedding(init, config.vocab_size, config.hidden_size)
        self.positions = self.make_positions(init)
        layers = [self.make_layer(init, index) for index in range(config.num_hidden_layers)]
        self.layers, self.layer_counts = arrange_layers(layers, layer_execution)
        self.norm = self.make_norm(init, config.hidden_size)
        self.head = self.make_head(init) if num_labels is None else None
        self.classifier = ClassificationHead(init, config.hidden_size, num_labels, bias=False) if num_labels else None

    def make_layer(self, init: Initializer, index: int) -> Layer:
        """Layer `index` of the family."""
        raise NotImplementedError

    def make_norm(self, init: Initializer, size: int) -> nnx.Module:
        """A norm of the family's kind: the one after the last layer, and usually those within."""
        return RMSNorm(init, size, eps=self.config.rms_norm_eps)

    def make_positions(self, init: Initializer) -> Embedding | None:
        """A table of learned positions, in the families that have one."""
        return None

    def make_head(self, init: Initializer) -> Head | None:
        """The output matrix, unless it is the token table."""
        c = self.config
        return None if c.tie_word_embeddings else Head(init, c.hidden_size, c.vocab_size)

    @property
    def cache_spec(self) -> CacheSpec:
        """What the layers cache for each token."""
        c = self.config
        heads = HeadLayout(c.num_attention_heads, c.num_key_value_heads, self.tensor_shards)
        return CacheSpec(
            num_layers=c.num_hidden_layers,
            num_kv_heads=heads.num_spread_kv_heads,
            head_dim=c.head_dim,
            reaches=tuple(Reach(trait.window) for trait in c.layer_traits()),
        )

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """What enters the first layer."""
        x = self.embedding(batch.token_ids)
        multiplier = self.config.embedding_multiplier
        if multiplier != 1.0:
            x = x * jnp.asarray(multiplier, x.dtype)
        if self.positions is not None:
            x = x + self.positions(batch.positions + self.position_offset)
        return x

    def __call__(self, batch: Batch, cache: PagedKVCache) -> tuple[Float[Array, "T D"], PagedKVCache]:
        """The normalised output of the last layer for each token, and the cache with their keys and values."""
        tables = [rope_table(f, batch.positions) for f in self.config.rope_frequencies(self.max_model_len)]
        traits = self.config.layer_traits()
        x, cache = run_layers(self.layers, self.layer_counts, traits, self.embed(batch), cache, tables)
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Float32 logits of the rows whose next token is wanted; those beyond `config.vocab_size` are padding."""
        return self._scaled(self.embedding.attend(hidden) if self.head is None else self.head(hidden))

    def logits_of(self, hidden: Float[Array, "R D"], token_ids: Int32[Array, " C"]) -> Float[Array, "R C"]:
        """Float32 logits of a few tokens: only their rows of the output matrix are read."""
        if self.head is None:
            weight, bias = self.embedding(token_ids).T, None
        else:
            weight, bias = self.head.weight.get_value()[:, token_ids], self.head.bias
        logits = jnp.dot(hidden, weight, preferred_element_type=jnp.float32)
        return self._scaled(logits if bias is None else logits + bias.get_value()[None, token_ids])

    def _scaled(self, logits: Float[Array, "R C"]) -> Float[Array, "R C"]:
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def num_parameters(model: nnx.Module) -> int:
    """How many numbers the model's weights are."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
