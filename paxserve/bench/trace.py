"""Requests to simulate: when they arrive, how long they are, what they share. From a file, or drawn at random."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.errors import ConfigError

MAX_LENGTH = 1_000_000
FIELDS = {"arrival", "prompt_len", "output_len", "prefix", "prefix_len"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds after the start."""
    prompt_len: int
    output_len: int
    prefix: str | None = None
    """Prompts that name the same prefix begin with the same `prefix_len` tokens."""
    prefix_len: int = 0


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal lengths of prompts and outputs, cut off at both ends."""

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float
    shortest: int = 4
    longest: int = 1024


LENGTHS = {
    "sharegpt": Lengths(prompt_mean=161.31, prompt_sigma=1.2, output_mean=337.99, output_sigma=0.9),
    "alpaca": Lengths(prompt_mean=19.31, prompt_sigma=0.6, output_mean=58.45, output_sigma=0.9),
}
"""Means as the PagedAttention paper (arXiv:2309.06180, figure 11) gives them; the spreads are chosen, not fitted."""


def draw_trace(lengths: Lengths, num: int, rate: float, seed: int) -> list[TraceRequest]:
    """Requests of random length in a Poisson process of `rate` a second; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)

    def draw(mean: float, sigma: float) -> list[int]:
        values = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
        return np.clip(np.round(values), lengths.shortest, lengths.longest).astype(int).tolist()

    prompts = draw(lengths.prompt_mean, lengths.prompt_sigma)
    outputs = draw(lengths.output_mean, lengths.output_sigma)
    arrivals = np.cumsum(rng.exponential(1 / rate, num)).tolist()
    return [
        TraceRequest(arrival=arrival, prompt_len=prompt, output_len=output)
        for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]


def with_prefixes(trace: list[TraceRequest], num_prefixes: int, prefix_len: int, seed: int) -> list[TraceRequest]:
    """The requests with one of so many shared prefixes in front of each prompt."""
    choices = np.random.default_rng(seed).integers(0, num_prefixes, len(trace)).tolist()
    return [
        replace(request, prefix=str(choice), prefix_len=prefix_len, prompt_len=request.prompt_len + prefix_len)
        for request, choice in zip(trace, choices, strict=True)
    ]


def at_rate(trace: list[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests arriving `factor` times as fast."""
    return [replace(request, arrival=request.arrival / factor) for request in trace]


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a JSONL file, in order of arrival. Raises `ConfigError` naming the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.") from None
    trace = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not trace:
        raise ConfigError(f"The trace {path} has no requests.")
    return sorted(trace, key=lambda request: request.arrival)


def _parse(line: str, place: str) -> TraceRequest:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON ({error}).") from None
    if not isinstance(row, dict) or not {"arrival", "prompt_len", "output_len"} <= row.keys() <= FIELDS:
        raise ConfigError(
            f"{place}: expected an object with arrival, prompt_len and output_len, and perhaps prefix and prefix_len."
        )
    arrival = row["arrival"]
    if not isinstance(arrival, (int, float)) or not 0 <= arrival < float("inf"):
        raise ConfigError(f"{place}: arrival must be seconds from 0 on, got {arrival!r}.")
    for name in ("prompt_len", "output_len"):
        if type(row[name]) is not int or not 1 <= row[name] <= MAX_LENGTH:
            raise ConfigError(f"{place}: {name} must be between 1 and {MAX_LENGTH}, got {row[name]!r}.")
    prefix, prefix_len = row.get("prefix"), row.get("prefix_len", 0)
    if type(prefix_len) is not int or not 0 <= prefix_len <= row["prompt_len"] or (prefix is None) != (prefix_len == 0):
        raise ConfigError(f"{place}: a prefix has a name and a prefix_len of at most prompt_len, got {prefix_len!r}.")
    return TraceRequest(
        arrival=float(arrival), prompt_len=row["prompt_len"], output_len=row["output_len"],
        prefix=None if prefix is None else str(prefix), prefix_len=prefix_len,
    )  # fmt: skip
