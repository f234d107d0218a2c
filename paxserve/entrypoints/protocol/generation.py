"""What the bodies of completions and chats share: sampling fields, stream options, usage."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictInt

from paxserve.entrypoints.protocol import beam_search
from paxserve.entrypoints.protocol.fields import check_extra_fields
from paxserve.errors import RequestError
from paxserve.sampling_params import RepetitionLimit, SamplingParams
from paxserve.server_config import ServerConfig

MAX_CACHE_SALT = 128
MAX_REQUEST_ID = 128
MAX_TEXT_LENGTH = 2**31

TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]

SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)
"""Fields that go to `SamplingParams` under their own name when they are given."""


class ApiModel(BaseModel):
    """Base of request bodies: finite numbers only, and fields that are not declared are kept to be judged."""

    # A limit on strings, far above the one on bodies: with one, pydantic also refuses halves of surrogate pairs.
    model_config = ConfigDict(
        extra="allow", allow_inf_nan=False, protected_namespaces=(), str_max_length=MAX_TEXT_LENGTH
    )

    model: str | None = None

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        check_extra_fields(self.model_extra)


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RepetitionDetection(BaseModel):
    """When an answer that goes round in circles is ended."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class SamplingFields(ApiModel, beam_search.BeamSearchFields):
    """The fields of both generating endpoints; null always means the default."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    repetition_detection: RepetitionDetection | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, ge=-(2**63), lt=2**63)
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_interval: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None

    _timeout: float | None = PrivateAttr(None)

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        self.set_defaults(config)
        at_most("stop", "strings", [self.stop] if isinstance(self.stop, str) else self.stop, config.max_stop_strings)
        at_most("bad_words", "words", self.bad_words, config.max_bad_words)
        if self.n is not None and self.n > config.max_n:
            raise RequestError(f"n must be at most {config.max_n}, got {self.n}.", "n")
        self.beam_search()
        if self.stream_options and not self.stream and self.stream_options.model_dump(exclude_none=True):
            raise RequestError("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.stream and self.prompt_logprobs:
            raise RequestError("prompt_logprobs are not available when `stream=True`.", "prompt_logprobs")
        if self.cache_salt is not None and not is_plain_text(self.cache_salt, MAX_CACHE_SALT):
            raise RequestError(
                f"cache_salt must have 1 to {MAX_CACHE_SALT} characters and none of @ / \\ NUL.", "cache_salt"
            )
        if self.request_id is not None and not is_plain_text(self.request_id, MAX_REQUEST_ID):
            raise RequestError(
                f"request_id must have 1 to {MAX_REQUEST_ID} characters and none of @ / \\ NUL.", "request_id"
            )

    def set_defaults(self, config: ServerConfig) -> None:
        """Fill in what the server says where the request does not."""
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = config.return_tokens_as_token_ids
        self._timeout = config.request_timeout or None
        self.stream_interval = max(self.stream_interval or 1, config.stream_interval)
        if self.stream and config.enable_force_include_usage:
            continuous = self.stream_options.continuous_usage_stats if self.stream_options else None
            self.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=continuous)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def take_headers(self, headers: Mapping[str, str]) -> None:
        """Let `X-Vllm-Priority` win over the body's priority. Raises `RequestError` when it is no integer."""
        asked = headers.get("x-vllm-priority")
        if asked is None:
            return
        if not re.fullmatch(r"-?\d{1,18}", asked):
            raise RequestError(f"X-Vllm-Priority must be an integer, got {asked[:64]!r}.", "priority")
        self.priority = int(asked)

    def engine_options(self) -> dict[str, Any]:
        """What the engine is told besides prompt and sampling parameters."""
        return {
            "cache_salt": self.cache_salt,
            "priority": self.priority or 0,
            "timeout": self._timeout,
            "beam_search": self.beam_search(),
            "truncation_side": self.truncation_side or "left",
        }

    def sampling_values(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `SamplingParams` from this body, over the model's own defaults (a search does not sample)."""
        names = SAMPLING_FIELDS
        if self.use_beam_search:
            names, defaults = beam_search.SAMPLING_FIELDS, {}
        given = {name: getattr(self, name) for name in names}
        if self.repetition_detection is not None:
            given["repetition_detection"] = RepetitionLimit(**self.repetition_detection.model_dump())
        return defaults | {name: value for name, value in given.items() if value is not None}


def at_most(param: str, what: str, values: Sequence[Any] | None, limit: int) -> None:
    """Raise `RequestError` for a list that is too long."""
    if values is not None and len(values) > limit:
        raise RequestError(f"{param} must have at most {limit} {what}, got {len(values)}.", param)


def is_plain_text(text: str, max_length: int) -> bool:
    """Whether a salt or id is short and safe to use in keys and logs."""
    return 1 <= len(text) <= max_length and text.isprintable() and not set(text) & set("@/\\")


def make_sampling_params(values: dict[str, Any]) -> SamplingParams:
    """The checked sampling parameters; an odd combination of types is the client's mistake too."""
    try:
        return SamplingParams(**values)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"Invalid sampling parameters: {error}") from None


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """How many tokens a request took."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: None = None


class StreamUsage(msgspec.Struct):
    """The usage of a stream's chunk, without empty details."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    """The log-probability of one token at a prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


FinishReason = Literal["stop", "length", "abort", "tool_calls", "repetition"]
