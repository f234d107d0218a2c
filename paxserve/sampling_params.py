"""How the tokens of one request are chosen and where its output ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paxserve.errors import RequestError

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

MAX_N = 128
"""Most choices one request may ask for; checked before anything is allocated."""

MAX_BAD_WORDS = 128

MAX_PATTERN_SIZE = 256
"""Longest pattern of tokens that repetition detection looks for at every token."""

FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


@dataclass(slots=True, frozen=True, kw_only=True)
class RepetitionLimit:
    """Ends an output ("repetition") whose last tokens are one pattern, `min_count` times in a row."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        sizes = f"1 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN_SIZE}"
        ok = 1 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE
        _check(ok, "repetition_detection", f"given sizes {sizes}", (self.min_pattern_size, self.max_pattern_size))
        _check(2 <= self.min_count, "repetition_detection", "given a min_count of at least 2", self.min_count)

    def is_reached(self, token_ids: list[int]) -> bool:
        """Whether the tokens end in such a repetition."""
        length = len(token_ids)
        for size in range(self.min_pattern_size, min(self.max_pattern_size, length // self.min_count) + 1):
            # A tail has the period `size` when it equals itself shifted by as much.
            start = length - size * self.min_count
            if token_ids[start : length - size] == token_ids[start + size :]:
                return True
        return False


def _check(condition: bool, param: str, expected: str, got: object) -> None:
    if not condition:
        raise RequestError(f"{param} must be {expected}, got {got!r}.", param)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters with vLLM's names, defaults and ranges.

    Raises `RequestError` naming the parameter when a value is out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    repetition_detection: RepetitionLimit | None = None
    # Filled in by the input processor, which knows the tokenizer and the model.
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    eos_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stop = _as_list(self.stop, "stop")
        self.stop_token_ids = _as_list(self.stop_token_ids, "stop_token_ids")
        self.bad_words = _as_list(self.bad_words, "bad_words")
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                setattr(self, name, 1 if getattr(self, name) else None)
        self._check_types()
        self._check_ranges()
        self._check_stops()
        self._check_token_lists()
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < 0.01:
            self.temperature = 0.01

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        """Whether token counts are needed to adjust the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def has_bias(self) -> bool:
        """Whether some tokens' logits are shifted or barred, at any step."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids or self.min_tokens)

    @property
    def has_lasting_bias(self) -> bool:
        """Whether logits are shifted or barred beyond the first `min_tokens` tokens."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids)

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every token id that ends the output, as far as this request honours it."""
        return set(self.stop_token_ids) | (set() if self.ignore_eos else set(self.eos_token_ids))

    def _check_types(self) -> None:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _check(
                _is_int(value) or (isinstance(value, float) and math.isfinite(value)), name, "a finite number", value
            )
        for name in ("n", "top_k", "min_tokens"):
            _check(_is_int(getattr(self, name)), name, "an integer", getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            value = getattr(self, name)
            _check(value is None or _is_int(value), name, "an integer or None", value)
        for name in FLAGS:
            _check(isinstance(getattr(self, name), bool), name, "true or false", getattr(self, name))

    def _check_ranges(self) -> None:
        _check(1 <= self.n <= MAX_N, "n", f"between 1 and {MAX_N}", self.n)
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _check(self.repetition_penalty > 0, "repetition_penalty", "greater than zero", self.repetition_penalty)
        _check(0 <= self.temperature <= 2, "temperature", "in [0, 2]", self.temperature)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k >= 0, "top_k", "0 (disable), or at least 1", self.top_k)
        _check(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "an integer of 64 bits", self.seed)
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "greater than or equal to 0", self.min_tokens)
        if self.max_tokens is not None:
            most = f"at most max_tokens={self.max_tokens}"
            _check(self.min_tokens <= self.max_tokens, "min_tokens", most, self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= -1, name, "-1 (the whole vocabulary) or at least 0", value)
        value = self.truncate_prompt_tokens
        _check(value is None or value == -1 or value >= 1, "truncate_prompt_tokens", "-1 or at least 1", value)
        if self.is_greedy:
            _check(self.n == 1, "n", "1 when using greedy sampling", self.n)

    def _check_stops(self) -> None:
        ok = all(isinstance(text, str) and text for text in self.stop)
        _check(ok, "stop", "one or several non-empty strings", self.stop)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True: they are found in the text.", "stop")
        ok = len(self.bad_words) <= MAX_BAD_WORDS and all(isinstance(word, str) and word for word in self.bad_words)
        _check(ok, "bad_words", f"at most {MAX_BAD_WORDS} non-empty strings", self.bad_words)

    def _check_token_lists(self) -> None:
        ok = all(_is_int(token) and token >= 0 for token in self.stop_token_ids)
        _check(ok, "stop_token_ids", "a list of token ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_list(self.allowed_token_ids, "allowed_token_ids")
            ok = len(self.allowed_token_ids) > 0 and all(_is_int(token) for token in self.allowed_token_ids)
            _check(ok, "allowed_token_ids", "a non-empty list of token ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            self.logit_bias = _parse_logit_bias(self.logit_bias)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_list(value: Any, param: str) -> list[Any]:
    """A list of its own from None, one string, or several values."""
    if isinstance(value, str):
        return [value]
    try:
        return list(value if value is not None else ())
    except TypeError:
        raise RequestError(f"{param} must be a list, got {value!r}.", param) from None


def _parse_logit_bias(bias: Any) -> dict[int, float]:
    """The bias with integer keys, clamped to [-100, 100] as OpenAI documents."""
    _check(isinstance(bias, Mapping), "logit_bias", "a mapping of token ids to numbers", bias)
    parsed = {}
    for key, value in bias.items():
        try:
            if isinstance(key, (bool, float)) or isinstance(value, bool):
                raise ValueError
            token, number = int(key), float(value)
        except (TypeError, ValueError, OverflowError):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {key!r}: {value!r}.", "logit_bias"
            ) from None
        _check(math.isfinite(number), "logit_bias", "made of finite numbers", value)
        parsed[token] = min(100.0, max(-100.0, number))
    return parsed
