"""What a measurement comes to: rates, percentiles, and the failures, as JSON and as text."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.bench.client import Record
from paxserve.errors import ConfigError

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, but the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
"""What is summed up in milliseconds, under vLLM's names."""


def summarise(records: list[Record], duration: float) -> dict[str, Any]:
    """Totals, rates and latencies of the requests that succeeded, with the keys of vLLM's `bench serve`."""
    done = [record for record in records if record.is_success]
    num_input, num_output = sum(r.prompt_len for r in done), sum(r.output_len for r in done)
    latencies = {
        "ttft": [r.ttft for r in done if r.ttft is not None],
        "tpot": [(r.latency - r.ttft) / (r.output_len - 1) for r in done if r.ttft is not None and r.output_len > 1],
        "itl": [itl for r in done for itl in r.itls],
        "e2el": [r.latency for r in done],
    }
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_concurrent_requests": most_at_once(records),
    }
    for name, values in latencies.items():
        summary |= statistics(name, values)
    return summary


def statistics(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds; None where there is nothing to average."""
    if not seconds:
        keys = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))
        return {f"{key}_{name}_ms": None for key in keys}
    ms = np.asarray(seconds) * 1000
    values = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    values |= {f"p{p}": np.percentile(ms, p) for p in PERCENTILES}
    return {f"{key}_{name}_ms": float(value) for key, value in values.items()}


def most_at_once(records: list[Record]) -> int:
    """The largest number of requests that were in flight together."""
    events = [(r.start, 1) for r in records] + [(r.start + r.latency, -1) for r in records]
    return int(max(np.cumsum([step for _, step in sorted(events)]), default=0))


def failures(records: list[Record]) -> list[str]:
    """Each different error with how often it came, the most frequent first."""
    counts = Counter(record.error for record in records if record.error is not None)
    return [f"{count} x {error}" for error, count in counts.most_common()]


def per_request(records: list[Record]) -> dict[str, list[Any]]:
    """Each request's own figures, for plots and a closer look."""
    first = min((record.start for record in records), default=0.0)
    return {
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len for record in records],
        "start_times": [record.start - first for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "latencies": [record.latency for record in records],
        "errors": [record.error for record in records],
    }


def as_text(summary: dict[str, Any]) -> str:
    """The summary as a person reads it."""
    lines = [
        f"Requests             {summary['completed']} succeeded, {summary['failed']} failed, "
        f"at most {summary['max_concurrent_requests']} at once",
        f"Duration             {summary['duration']:.2f} s",
        f"Tokens               {summary['total_input_tokens']} in, {summary['total_output_tokens']} out",
        f"Request throughput   {summary['request_throughput']:.2f} requests/s",
        f"Output throughput    {summary['output_throughput']:.2f} tokens/s",
        f"Total throughput     {summary['total_token_throughput']:.2f} tokens/s",
        "",
        f"{'milliseconds':<38}{'mean':>10}{'median':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES[1:]),
    ]
    for name, title in LATENCIES.items():
        cells = [summary[f"{key}_{name}_ms"] for key in ("mean", "median", *(f"p{p}" for p in PERCENTILES[1:]))]
        lines.append(f"{title:<38}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>10}" for cell in cells))
    return "\n".join(lines)


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON. Raises `ConfigError` if the place cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from None
