"""Prompts and parameters as callers give them, checked and turned into what the engine core runs. No I/O."""

import copy
import math
import numbers
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from paxserve.beam_search_params import BeamSearchParams
from paxserve.config import ModelConfig
from paxserve.errors import ConfigError, RequestError
from paxserve.loaders.json_file import read_json_object
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.messages import EngineRequest, ModelInfo
from paxserve.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`."""

PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
MAX_BAD_WORDS_TOKENS = 1024
MAX_CACHE_SALT = 128
GENERATION_CONFIG_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json that are default sampling values, and their names here."""


def default_sampling_params(model_config: ModelConfig, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Default values of `SamplingParams` fields: the model's own unless told to be neutral, then the overrides.

    Raises `ConfigError` when a value is out of range.
    """
    source = {} if model_config.generation_config == "vllm" else dict(generation_config)
    source |= model_config.override_generation_config
    defaults = {name: source[key] for key, name in GENERATION_CONFIG_FIELDS.items() if source.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(
            f"The model's generation config is not usable: {error.message} "
            "Correct it with override_generation_config, or ignore it with generation_config='vllm'."
        ) from None
    return defaults


def collect_eos_token_ids(
    tokenizer: Tokenizer | None,
    config_eos: int | Iterable[int] | None,
    generation_config: Mapping[str, Any],
    override: Mapping[str, Any],
) -> list[int]:
    """Every id that ends an output by itself: the tokenizer's, the model config's, the generation config's."""
    generation_eos = override.get("eos_token_id", generation_config.get("eos_token_id"))
    found: list[int] = []
    for source in (tokenizer.eos_token_id if tokenizer else None, config_eos, generation_eos):
        found += [source] if isinstance(source, int) else list(source or ())
    return list(dict.fromkeys(found))


def prompt_text(prompt: Prompt) -> str | None:
    """The text of a prompt, or None when it was given as token ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt", ())
    return prompt if isinstance(prompt, str) else None


def as_prompts(prompts: Any) -> list[Prompt]:
    """The prompts one by one; a text, a mapping or a list of ids is a single one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], numbers.Integral):
        return [prompts]
    return prompts


class InputProcessor:
    """Checks requests against one model and one tokenizer, and fills in what only these know."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        generation_config: Mapping[str, Any],
        config_eos_token_ids: int | Iterable[int] | None,
        *,
        max_model_len: int,
        vocab_size: int,
        max_prompt_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_prompt_tokens = max_prompt_tokens
        self.max_logprobs = model_config.max_logprobs
        self.default_values = default_sampling_params(model_config, generation_config)
        override = model_config.override_generation_config
        eos_token_ids = collect_eos_token_ids(tokenizer, config_eos_token_ids, generation_config, override)
        self.eos_token_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]

    @classmethod
    def for_model(cls, model_config: ModelConfig, tokenizer: Tokenizer | None, model_info: ModelInfo) -> Self:
        """The processor for a model that the engine core has loaded."""
        generation_config: Mapping[str, Any] = model_info.generation_config
        if model_config.generation_config not in ("auto", "vllm"):
            folder = Path(model_config.generation_config).expanduser()
            generation_config = read_json_object(folder / "generation_config.json")
        return cls(
            model_config,
            tokenizer,
            generation_config,
            model_info.eos_token_ids,
            max_model_len=model_info.max_model_len,
            vocab_size=model_info.vocab_size,
            max_prompt_tokens=model_info.max_sequence_tokens,
        )

    def default_sampling_params(self) -> SamplingParams:
        """Fresh parameters with this model's default values."""
        return SamplingParams(**self.default_values)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        beam_search: BeamSearchParams | None = None,
        add_special_tokens: bool = True,
        truncation_side: str = "left",
    ) -> EngineRequest:
        """The request for the engine core. `params` is copied. Raises `RequestError` for whatever is wrong."""
        arrival_time = time.time() if arrival_time is None else arrival_time
        _check_priority(priority)
        _check_timeout(timeout)
        if isinstance(prompt, Mapping) and cache_salt is None:
            cache_salt = prompt.get("cache_salt")
        _check_cache_salt(cache_salt)
        params = copy.copy(params)
        params.eos_token_ids = list(self.eos_token_ids)
        if beam_search is not None:
            self._check_beams(beam_search, params)
        self._check_params(params)
        prompt_token_ids = self._prompt_token_ids(prompt, params, add_special_tokens)
        prompt_token_ids = self._truncate(prompt_token_ids, params, truncation_side)
        self._check_length(len(prompt_token_ids))
        self._limit_output(params, len(prompt_token_ids))
        if params.top_k >= self.vocab_size:
            params.top_k = 0
        params.bad_words_token_ids = self._bad_words_token_ids(params.bad_words)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            priority=priority,
            timeout=timeout,
            beam_search=beam_search,
        )

    def _prompt_token_ids(self, prompt: Prompt, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - PROMPT_KEYS
            if unknown:
                raise RequestError(f"A prompt has no field {min(map(str, unknown))!r}: this is a text model.", "prompt")
            # Ids win over text, which then is only what they came from.
            token_ids = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt", ()) if token_ids is None else token_ids
        if isinstance(prompt, str):
            token_ids = self._encode(prompt, params, add_special_tokens)
        else:
            token_ids = as_token_ids(prompt)
            self._check_vocabulary(token_ids, "prompt")
        if not token_ids:
            raise RequestError("The prompt must not be empty.", "prompt")
        return token_ids

    def _truncate(self, token_ids: list[int], params: SamplingParams, side: str) -> list[int]:
        limit = params.truncate_prompt_tokens
        if limit == -1:
            # As long as a prompt may be: one token must be left to generate.
            limit = max(1, min(self.max_model_len - 1, self.max_prompt_tokens))
        if limit is None:
            return token_ids
        return token_ids[:limit] if side == "right" else token_ids[-limit:]

    def _encode(self, text: str, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        tokenizer = self._need_tokenizer("A text prompt", "prompt")
        if not text:
            raise RequestError("The prompt must not be empty.", "prompt")
        if params.truncate_prompt_tokens is None and len(text) > self.max_model_len:
            # A text so long that even the longest token cannot bring it down is refused before it costs time.
            if len(text) > self.max_model_len * tokenizer.max_token_chars:
                least = -(-len(text) // tokenizer.max_token_chars)
                raise self._too_long(f"at least {least}", "input_text")
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _need_tokenizer(self, what: str, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, but skip_tokenizer_init is set.", param)
        return self.tokenizer

    def _too_long(self, count: str, param: str) -> RequestError:
        return RequestError(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
            f"{count} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            param,
        )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self.max_model_len:
            raise self._too_long(str(num_tokens), "input_tokens")
        if num_tokens > self.max_prompt_tokens:
            raise RequestError(
                f"The prompt contains {num_tokens} tokens, but the KV cache holds only {self.max_prompt_tokens}. "
                "Shorten the prompt, or give the engine more memory (kv_cache_memory_bytes, gpu_memory_utilization).",
                "input_tokens",
            )

    def _limit_output(self, params: SamplingParams, prompt_len: int) -> None:
        """Bound the output by what is left of the context and of the pool (the last token needs no KV)."""
        room = min(self.max_model_len - prompt_len, self.max_prompt_tokens - prompt_len + 1)
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params.min_tokens = min(params.min_tokens, params.max_tokens)

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            self._check_num_logprobs(getattr(params, name), name)
        limit = params.truncate_prompt_tokens
        if limit is not None and limit > self.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be at most max_model_len={self.max_model_len}, got {limit}.",
                "truncate_prompt_tokens",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_vocabulary(list(getattr(params, name) or ()), name)
        if params.stop:
            self._need_tokenizer("stop", "stop")

    def _check_num_logprobs(self, count: int | None, name: str) -> None:
        allowed = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        if count is None or 0 <= count <= allowed or (count == -1 and self.max_logprobs == -1):
            return
        asked = f"the whole vocabulary ({name}=-1)" if count == -1 else str(count)
        raise RequestError(f"Requested {name} of {asked}, which is greater than max allowed: {allowed}.", name)

    def _check_beams(self, beam_search: BeamSearchParams, params: SamplingParams) -> None:
        allowed = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        num_candidates = beam_search.num_candidates(len(params.all_stop_token_ids))
        if num_candidates > allowed:
            raise RequestError(
                f"{beam_search.beam_width} beams look at {num_candidates} tokens at each place (as many as there are "
                f"beams and tokens that end an output), which is greater than max_logprobs={allowed}.",
                "beam_width",
            )

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise RequestError(
                f"Token id {wrong} in {param} is out of vocabulary: ids go from 0 to {self.vocab_size - 1}.", param
            )

    def _bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it is spelt at the beginning of a text and, if that differs in kind, after a space."""
        if not words:
            return []
        encode = self._need_tokenizer("bad_words", "bad_words").encode
        found: list[list[int]] = []
        for word in words:
            bare = word.lstrip() or word
            plain = list(encode(bare, add_special_tokens=False))
            spaced = list(encode(" " + bare, add_special_tokens=False))
            found.append(plain)
            # A spelling that only puts a space token in front is caught by the plain one already.
            if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        found = [token_ids for token_ids in found if token_ids]
        self._check_vocabulary([token_id for token_ids in found for token_id in token_ids], "bad_words")
        total = sum(map(len, found))
        if total > MAX_BAD_WORDS_TOKENS:
            raise RequestError(f"bad_words must be at most {MAX_BAD_WORDS_TOKENS} tokens, got {total}.", "bad_words")
        return found


def as_token_ids(prompt: Iterable[Any]) -> list[int]:
    """The ids as plain integers. Raises `RequestError` for anything that is not a list of integers."""
    try:
        token_ids = [operator.index(token_id) for token_id in prompt if not isinstance(token_id, bool)]
        if len(token_ids) == len(prompt) and not isinstance(prompt, (bytes, bytearray)):  # type: ignore[arg-type]
            return token_ids
    except TypeError:
        pass
    raise RequestError("A prompt must be a text, or a list of token ids.", "prompt")


def _check_priority(priority: object) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority must be an integer of 64 bits, got {priority!r}.", "priority")


def _check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < math.inf:
        raise RequestError(f"timeout must be a number of seconds above 0, got {timeout!r}.", "timeout")


def _check_cache_salt(cache_salt: object) -> None:
    if cache_salt is None:
        return
    ok = isinstance(cache_salt, str) and 1 <= len(cache_salt) <= MAX_CACHE_SALT
    if not ok or not set(str(cache_salt)).isdisjoint("@/\\\0"):
        raise RequestError(
            f"cache_salt must be 1 to {MAX_CACHE_SALT} characters without '@', '/', '\\' and NUL, got {cache_salt!r}.",
            "cache_salt",
        )
