"""How a beam search goes: vLLM's names, transformers' meanings."""

from dataclasses import dataclass
from typing import Literal

from paxserve.errors import RequestError

MAX_BEAM_WIDTH = 128


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. Raises `RequestError` naming the one that is out of range."""

    beam_width: int
    """Sequences that are followed at once, and returned."""
    max_tokens: int | None = 16
    """Most tokens of an output; None is what the context leaves."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """0 or 1: the search goes by the model's own probabilities."""
    include_stop_str_in_output: bool = False
    """Whether the token that ends an output is part of its text."""
    length_penalty: float = 1.0
    """A sequence's score is its log-probability divided by its generated length to this power."""
    early_stopping: bool | Literal["never"] = False
    """Stop when `beam_width` sequences are complete (true), when better ones are unlikely (false), or impossible."""

    def __post_init__(self) -> None:
        if type(self.beam_width) is not int or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            expected = f"an integer between 1 and {MAX_BEAM_WIDTH}"
            raise RequestError(f"beam_width must be {expected}, got {self.beam_width!r}.", "beam_width")
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise RequestError(
                f"max_tokens must be an integer above 0, or None, got {self.max_tokens!r}.", "max_tokens"
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)
        if self.temperature not in (0, 1):
            raise RequestError(
                f"temperature must be 0 or 1 with beam search, which goes by the model's own probabilities, "
                f"got {self.temperature!r}.",
                "temperature",
            )
        if type(self.length_penalty) not in (int, float) or not abs(self.length_penalty) <= 100:
            raise RequestError(
                f"length_penalty must be a number in [-100, 100], got {self.length_penalty!r}.", "length_penalty"
            )
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(
                f"early_stopping must be true, false or 'never', got {self.early_stopping!r}.", "early_stopping"
            )

    def num_candidates(self, num_eos: int) -> int:
        """Most likely continuations of a beam to look at: as many as may go on, and every end that may be among them.

        No beam can have more of the best than that, so that the search is the same as over the whole vocabulary.
        """
        return self.beam_width + num_eos
