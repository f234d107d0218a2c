"""What passes between the front (text, HTTP) and the engine core (tokens).

Plain data, so that msgspec can send it between processes without pickle.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from paxserve.beam_search_params import BeamSearchParams
from paxserve.pooling_params import PoolingParams
from paxserve.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """One request as the engine core sees it: token ids in, token ids out."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    """`time.time()` when the front received it, in seconds."""
    cache_salt: str | None = None
    """Requests share prefix-cache pages only with requests of equal salt."""
    cache_keys: list[str] = field(default_factory=list)
    """What else than tokens the keys and values depend on (an adapter, images), in the way of a salt."""
    priority: int = 0
    """Under the priority policy the lowest goes first; under fcfs it must be 0."""
    timeout: float | None = None
    """Seconds after its arrival at which the request is ended, finished or not."""
    pooling: PoolingParams | None = None
    """Set when a vector is wanted instead of tokens; `params` then say nothing."""
    num_first: int | None = None
    """Tokens of the first of two texts, for encoders that tell them apart; None when there is one text."""
    beam_search: BeamSearchParams | None = None
    """Search for the `n` best outputs instead of sampling; they come when all of them are complete."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token in the whole vocabulary, 1 being the most likely."""


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one engine step brought one choice of one request."""

    request_id: str
    index: int = 0
    """Which of the request's `n` choices this belongs to."""
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a new token, when the request asked for logprobs."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a prompt token (the first None), sent once, with the first new token of choice 0."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while running."""
    stop_reason: int | str | None = None
    """The stop token id that ended it, or "timeout"; None for EOS."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    first_scheduled_time: float = 0.0
    """`time.time()` when the request first entered a step; 0 when it has been told before."""
    num_preemptions: int = 0
    """How often it was preempted so far; 0 when that has been told before."""
    pooled: bytes | None = None
    """A pooling request's float32 numbers: a vector, or one for each token, one after another."""
    cumulative_logprob: float | None = None
    """Log-probability of the whole output, where it was found by beam search."""


class DecodedTokens(msgspec.Struct, array_like=True):
    """What one step brought many requests that go on: `EngineOutput`s that say nothing but new tokens."""

    request_ids: list[str]
    indices: list[int]
    new_token_ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.request_ids)

    def columns(self) -> tuple[list[str], list[int], list[list[int]]]:
        """Requests, choices, and what each got."""
        return self.request_ids, self.indices, self.new_token_ids

    def append(self, request_id: str, index: int, tokens: list[int]) -> None:
        """Add one choice's tokens."""
        self.request_ids.append(request_id)
        self.indices.append(index)
        self.new_token_ids.append(tokens)

    def __iter__(self) -> Iterator[EngineOutput]:
        for request_id, index, tokens in zip(*self.columns(), strict=True):
            yield EngineOutput(request_id=request_id, index=index, new_token_ids=tokens)


class StepOutputs:
    """All that a step brought, as `EngineOutput`s of which most are written out only when they are read."""

    def __init__(self, listed: list[EngineOutput], decoded: DecodedTokens | None = None) -> None:
        self.listed = listed
        self.decoded = decoded

    def __len__(self) -> int:
        return len(self.listed) + (0 if self.decoded is None else len(self.decoded))

    def __iter__(self) -> Iterator[EngineOutput]:
        yield from self.listed
        if self.decoded is not None:
            yield from self.decoded

    def add(self, outputs: "list[EngineOutput] | DecodedTokens") -> None:
        """Put more behind them; at most once what is `DecodedTokens`."""
        if isinstance(outputs, DecodedTokens):
            assert self.decoded is None
            self.decoded = outputs
        else:
            self.listed += outputs


STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds by which steps are counted."""


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine core: gauges now, counters since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_in_use: int = 0
    """Pages that some request holds; cached pages nobody holds do not count."""
    wasted_tokens: int = 0
    """KV positions allocated to running requests but not (yet) holding a token."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there."""
    offloaded_queries: int = 0
    """Prompt tokens not found there, and looked up in host memory."""
    offloaded_hits: int = 0
    """Prompt tokens whose pages came back from host memory."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    last_step_tokens: int = 0
    step_sizes: list[int] = field(default_factory=list)
    """Steps by their tokens: up to each of `STEP_TOKEN_BUCKETS` and above the one before it, then the larger ones."""
    step_tokens: int = 0
    """Tokens of all steps."""
    padding_tokens: int = 0
    """Positions that steps computed only because their programs have a fixed size."""
    num_programs: int = 0
    """Compiled step programs."""
    recompilations: int = 0
    """Compilations after the engine said it was ready; each one is a bug."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """Host time by phase (schedule, pack, dispatch, wait, process), summed since start."""


@dataclass(slots=True, kw_only=True)
class PoolingInfo:
    """What the front must know about a model that pools."""

    task: str
    """embed or classify."""
    size: int
    """Numbers in a vector, or classes."""
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] = field(default_factory=list)
    """The only lengths that vectors may be cut to; empty allows all."""
    labels: list[str] = field(default_factory=list)
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    """What to put before texts, by purpose."""
    default_prompt: str | None = None
    scores_by_tokens: bool = False
    """Whether pairs are put into a question that a language model answers by yes or no."""


@dataclass(slots=True, kw_only=True)
class ModelInfo:
    """What the front must know about the engine once it is ready."""

    max_model_len: int
    """Most tokens a sequence may have, prompt and output."""
    max_sequence_tokens: int
    """The same, or less where the KV pool is smaller than one sequence of that length."""
    vocab_size: int
    """Width of the logits: ids at or above it do not exist."""
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: list[int]
    """End-of-sequence ids of config.json and generation_config.json together."""
    generation_config: dict[str, float | int | None]
    """Default sampling values of the checkpoint (`generation_config.json`), numbers only."""
    dtype: str
    num_programs: int
    startup_seconds: dict[str, float]
    """Seconds spent in each phase of the start: load, compile, warm-up."""
    pooling: PoolingInfo | None = None
    """None for a model that generates."""
