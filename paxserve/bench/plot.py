"""A picture of one load test: time to first token and end of each request over time, and both latencies' spread."""

from pathlib import Path
from typing import Any

from paxserve.errors import ConfigError


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a result of `bench serve` into `path` (.png, .svg, .pdf).

    Raises `ConfigError` when matplotlib, an optional dependency, is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # late: optional, and slow to load
    except ImportError:
        raise ConfigError("A plot needs matplotlib: pip install 'paxserve[plot]'.") from None
    is_done = [error is None for error in result["errors"]]
    starts, ttfts, latencies, itls = (
        [value for value, ok in zip(result[key], is_done, strict=True) if ok]
        for key in ("start_times", "ttfts", "latencies", "itls")
    )
    figure = Figure(figsize=(12, 4), layout="constrained")
    timeline, first_tokens, gaps = figure.subplots(1, 3)
    timeline.hlines(range(len(starts)), starts, [s + x for s, x in zip(starts, latencies, strict=True)], lw=1)
    timeline.plot([s + t for s, t in zip(starts, ttfts, strict=True)], range(len(starts)), ".", color="tab:red")
    timeline.set(title="Requests (red: first token)", xlabel="seconds", ylabel="request")
    for axes, seconds, title in (
        (first_tokens, ttfts, "Time to first token"),
        (gaps, [gap for row in itls for gap in row], "Inter-token latency"),
    ):
        axes.ecdf([1000 * value for value in seconds]) if seconds else None
        axes.set(title=title, xlabel="milliseconds", ylabel="share of all", ylim=(0, 1))
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot write the plot {path}: {error}.") from None
