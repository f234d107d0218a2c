"""The one device step of a pooling model: whole prompts in, one vector a prompt out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from models.inputs import Batch, WholePrompts
from models.layers.pooling import Pooling, Projection, pool
from paxserve.messages import EngineRequest


class PooledModel(nnx.Module):
    """A model and what turns its pooled states into answers."""

    def __init__(
        self,
        backbone: nnx.Module,
        projections: Sequence[Projection],
        pooling: Pooling,
        score_ids: tuple[int, ...],
        expert_backend: str,
    ) -> None:
        """`score_ids` are a language model's words for no and yes, if it scores by them."""
        self.backbone = backbone
        self.projections = nnx.List(list(projections))
        self.pooling: Pooling = pooling
        self.score_ids = score_ids
        self.expert_backend = expert_backend

    def __call__(self, batch: Batch, cu_lens: Int32[Array, " R+1"]) -> tuple[Float32[Array, "R D"], Array]:
        """The vector (or logits) of each row, and every token's last hidden state."""
        backbone: Any = self.backbone
        hidden, _ = backbone(batch, WholePrompts(cu_lens, backbone.config.is_causal, self.expert_backend))
        pooled = pool(hidden, cu_lens, self.pooling)
        if self.score_ids:
            logits = backbone.logits_of(pooled.astype(hidden.dtype), jnp.asarray(self.score_ids, jnp.int32))
            pooled = logits[:, 1:] - logits[:, :1]  # the logit of yes against no
        elif backbone.classifier is not None:
            pooled = backbone.classifier(pooled)
        for projection in self.projections:
            pooled = projection(pooled)
        return pooled, hidden.astype(jnp.float32)


@dataclass(frozen=True)
class PoolingLayout:
    """The shape of one compiled step, and where each field sits in its packed buffer."""

    num_tokens: int
    num_rows: int

    @property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Offset and length of each field, in int32 words."""
        tokens = self.num_tokens
        names = ("token_ids", "positions", "token_types")
        fields = {name: (index * tokens, tokens) for index, name in enumerate(names)}
        return fields | {"cu_lens": (len(names) * tokens, self.num_rows + 1)}

    @property
    def size(self) -> int:
        """Words in the packed buffer."""
        return sum(length for _, length in self.fields.values())


def make_pooling_step(graphdef: Any, treedef: Any, layout: PoolingLayout) -> Callable[..., Any]:
    """The step function of one size: `step(weights, packed) -> (pooled [R, D], hidden [T, D])`, both float32."""

    def step(weights: list[Array], packed: Int32[Array, " L"]) -> tuple[Array, Array]:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
        fields = {name: packed[start : start + size] for name, (start, size) in layout.fields.items()}
        batch = Batch(fields["token_ids"], fields["positions"], fields["token_types"])
        return model(batch, fields["cu_lens"])

    return step


def pack_prompts(requests: Sequence[EngineRequest], layout: PoolingLayout) -> np.ndarray:
    """The packed int32 buffer of a step; rows that are not there are empty, at the end of the tokens."""
    buffer = np.zeros(layout.size, np.int32)
    view = {name: buffer[offset : offset + length] for name, (offset, length) in layout.fields.items()}
    end = 0
    for row, request in enumerate(requests):
        start, end = end, end + len(request.prompt_token_ids)
        view["token_ids"][start:end] = request.prompt_token_ids
        view["positions"][start:end] = np.arange(end - start)
        if request.num_first is not None:
            view["token_types"][start + request.num_first : end] = 1
        view["cu_lens"][row + 1 :] = end
    return buffer
