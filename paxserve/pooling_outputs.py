"""What a caller of a pooling model gets back: names and meanings as in vLLM's offline API."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from paxserve.outputs import RequestMetrics

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class PoolingOutput:
    """The numbers as they are."""

    data: "np.ndarray"
    """Float32 [D] or, for token_embed, [tokens, D]."""


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A text's probability of each class (logits with `use_activation=False`)."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


OutputT = TypeVar("OutputT")


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(Generic[OutputT]):
    """The output of one pooling request."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What `LLM.embed` returns for each prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What `LLM.classify` returns for each prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What `LLM.score` returns for each pair."""
