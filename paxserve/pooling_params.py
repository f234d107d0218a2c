"""How one request wants its vector: names and meanings as in vLLM's offline API."""

from dataclasses import dataclass
from typing import Literal

from paxserve.errors import RequestError

PoolingTask = Literal["embed", "classify", "token_embed"]
TASKS = ("embed", "classify", "token_embed")


@dataclass(slots=True)
class PoolingParams:
    """What becomes of a pooled vector; None is the model's own way."""

    use_activation: bool | None = None
    """Normalise a vector to length 1, or turn class logits into probabilities."""
    dimensions: int | None = None
    """Keep only the first numbers of a vector (Matryoshka), before it is normalised."""
    task: PoolingTask | None = None
    """One vector or one list of probabilities a prompt, or a vector for each of its tokens."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise RequestError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}.", "task")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise RequestError(f"use_activation must be true or false, got {self.use_activation!r}.", "use_activation")
        if self.dimensions is not None and (not isinstance(self.dimensions, int) or self.dimensions < 1):
            raise RequestError(f"dimensions must be at least 1, got {self.dimensions!r}.", "dimensions")
