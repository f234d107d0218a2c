"""The bodies of /v1/completions."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from paxserve.entrypoints.protocol.generation import (
    PromptLogprob,
    SamplingFields,
    StreamUsage,
    TokenIds,
    Usage,
    at_most,
    make_sampling_params,
)
from paxserve.errors import RequestError
from paxserve.sampling_params import SamplingParams
from paxserve.server_config import ServerConfig


class CompletionRequest(SamplingFields):
    """Continue one or several prompts, each a text or a list of token ids."""

    prompt: str | TokenIds | list[str] | list[TokenIds] | None = Field(None, union_mode="left_to_right")
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        if not self.prompt:
            raise RequestError("prompt must be given and non-empty: a text, token ids, or a list of either.", "prompt")
        prompts = self.prompts
        at_most("prompt", "entries", prompts, config.max_prompts)
        if self.is_prompt_only and self.use_beam_search:
            raise RequestError("max_tokens must be at least 1 with use_beam_search, got 0.", "max_tokens")
        num_choices = len(prompts) * (self.n or 1)
        if num_choices > config.max_choices:
            raise RequestError(f"Prompts times n must be at most {config.max_choices}, got {num_choices}.", "n")
        if not all(prompts):
            raise RequestError("prompt must have no empty entry.", "prompt")
        if self.max_tokens is not None and self.max_tokens < (0 if self.echo else 1):
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}.", "max_tokens")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, also when one came alone."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt or []  # type: ignore[return-value]

    @property
    def is_prompt_only(self) -> bool:
        """Whether nothing is to be generated: the prompt is echoed, perhaps with log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The sampling parameters that this body asks for."""
        values = self.sampling_values(defaults)
        if self.max_tokens is not None:
            values["max_tokens"] = max(1, self.max_tokens)
        values.setdefault("max_tokens", 16)
        values["logprobs"] = self.logprobs
        values["prompt_logprobs"] = self.prompt_logprobs
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            values["prompt_logprobs"] = self.logprobs
        return make_sampling_params(values)


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities, one entry a token in every list."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """One finished choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None
    routed_experts: None = None


class CompletionResponse(msgspec.Struct):
    """The answer to a request that does not stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None
    object: str = "text_completion"
    service_tier: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class CompletionDelta(msgspec.Struct):
    """What a chunk adds to one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class CompletionChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionDelta]
    usage: StreamUsage | UnsetType = UNSET
    system_fingerprint: str | None | UnsetType = UNSET
