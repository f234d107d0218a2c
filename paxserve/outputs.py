"""What a caller gets back: names and meanings as in vLLM's offline API."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """Rank in the vocabulary, 1 being the most likely."""
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` outputs of a request, whole or (in a stream) so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this output is complete."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.time()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The output of one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """One of the outputs that a beam search found."""

    tokens: list[int]
    """Prompt and output."""
    text: str
    """The text of both."""
    cum_logprob: float
    score: float
    """What the sequences are ordered by: the log-probability over the output's length to the power of the penalty."""
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """Of each output token and the likeliest at its place, as many as there are beams."""


@dataclass(slots=True, kw_only=True)
class BeamSearchOutput:
    """What a beam search found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]
