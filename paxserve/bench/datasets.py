"""Requests to measure with: random token ids, JSONL files, and the workloads of `data/workload.json`."""

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.errors import ConfigError

FIRST_RANDOM_TOKEN = 3
"""Smallest random token id: below it many vocabularies keep padding, begin and end."""

WORKLOADS = ("W1", "W2", "W3", "W4")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request of a data set."""

    prompt: str | list[int]
    max_tokens: int
    arrival: float | None = None
    """Seconds after the start at which it is sent; None leaves that to the request rate."""


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Shape of a random data set, with the meanings of vLLM's `--random-*` flags."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are uniform between (1 - ratio) and (1 + ratio) times the ones above."""
    prefix_len: int = 0
    """Tokens that all prompts share, in front of their own."""
    vocab_size: int = 10_000
    """Token ids are drawn below this."""

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1 or self.prefix_len < 0:
            raise ConfigError("Random lengths must be at least 1, and the shared prefix at least 0.")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"The range ratio must be in [0, 1), got {self.range_ratio}.")
        if self.vocab_size <= FIRST_RANDOM_TOKEN:
            raise ConfigError(f"The vocabulary must be larger than {FIRST_RANDOM_TOKEN}, got {self.vocab_size}.")


def random_requests(num: int, lengths: RandomLengths, seed: int) -> list[BenchRequest]:
    """Requests of random token ids; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    low, high = FIRST_RANDOM_TOKEN, lengths.vocab_size

    def draw_len(mean: int) -> int:
        span = mean * lengths.range_ratio
        return int(rng.integers(max(1, round(mean - span)), round(mean + span), endpoint=True))

    prefix = rng.integers(low, high, lengths.prefix_len).tolist()
    return [
        BenchRequest(
            prompt=prefix + rng.integers(low, high, draw_len(lengths.input_len)).tolist(),
            max_tokens=draw_len(lengths.output_len),
        )
        for _ in range(num)
    ]


def read_jsonl(path: Path, default_max_tokens: int) -> list[BenchRequest]:
    """The requests of a JSONL file: rows of `prompt` (text) or `prompt_token_ids`, and perhaps `max_tokens`.

    Raises `ConfigError` naming the line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read the data set {path}: {error.strerror}.") from None
    rows = [_jsonl_row(line, f"{path}:{n}", default_max_tokens) for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"The data set {path} has no requests.")
    return rows


def _jsonl_row(line: str, place: str, default_max_tokens: int) -> BenchRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON ({error}).") from None
    if not isinstance(row, dict) or len({"prompt", "prompt_token_ids"} & row.keys()) != 1:
        raise ConfigError(f'{place}: expected an object with either "prompt" or "prompt_token_ids".')
    unknown = row.keys() - {"prompt", "prompt_token_ids", "max_tokens"}
    if unknown:
        raise ConfigError(f"{place}: unknown field {min(unknown)!r}; only max_tokens may stand beside the prompt.")
    prompt, max_tokens = row.get("prompt", row.get("prompt_token_ids")), row.get("max_tokens", default_max_tokens)
    is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if not prompt or not (is_ids if "prompt_token_ids" in row else isinstance(prompt, str)):
        raise ConfigError(f"{place}: prompt must be a non-empty string, prompt_token_ids a non-empty list of integers.")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigError(f"{place}: max_tokens must be an integer of at least 1, got {max_tokens!r}.")
    return BenchRequest(prompt=prompt, max_tokens=max_tokens)


def read_workload(name: str, rate: float | None = None, path: Path | None = None) -> list[BenchRequest]:
    """One of `WORKLOADS`, from `path` or the copy that paxserve brings.

    W3 is W1's requests arriving at `rate` a second on average, spaced by the file's own gaps.
    """
    source = path if path is not None else files("paxserve.bench") / "data" / "workload.json"
    try:
        loaded: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
        rows = loaded["W1" if name == "W3" else name]["requests"]
        requests = [BenchRequest(prompt=row["prompt_ids"], max_tokens=row["max_tokens"]) for row in rows]
        gaps = loaded["W3"]["unit_gaps"] if name == "W3" else []
    except OSError as error:
        raise ConfigError(f"Cannot read the workload file {source}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{source} holds no workload {name}: {error!r}.") from None
    if name != "W3":
        return requests
    if rate is None or rate <= 0:
        raise ConfigError("W3 needs a request rate greater than 0.")
    return [replace(request, arrival=at / rate) for request, at in zip(requests, accumulate(gaps), strict=True)]


def with_first_token(requests: list[BenchRequest], token: int) -> list[BenchRequest]:
    """The requests with another first token, so that no prefix cache knows them from an earlier run."""
    return [replace(request, prompt=[token, *request.prompt[1:]]) for request in requests]


def reversed_prompt(request: BenchRequest) -> BenchRequest:
    """The request backwards, for a trial that leaves nothing useful in a prefix cache; text stays as it is."""
    return replace(request, prompt=request.prompt if isinstance(request.prompt, str) else request.prompt[::-1])
