"""One line in the log every few seconds while the engine works: how much, how fast."""

import asyncio
import logging
import time
from typing import Protocol

from paxserve.messages import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


class HasStats(Protocol):
    """Whatever knows the engine's state."""

    stats: EngineStats


async def log_stats(engine: HasStats, interval: float = INTERVAL_SECONDS) -> None:
    """Log until cancelled; silent while nothing happens."""
    last, last_time = EngineStats(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, stats = time.monotonic(), engine.stats
        if stats.num_steps != last.num_steps:
            logger.info(describe(last, stats, now - last_time))
        last, last_time = stats, now


def describe(last: EngineStats, stats: EngineStats, seconds: float) -> str:
    """The line for the time between two snapshots."""
    prompt = (stats.prompt_tokens - last.prompt_tokens) / seconds
    output = (stats.generation_tokens - last.generation_tokens) / seconds
    pages = 100 * stats.num_pages_in_use / max(1, stats.num_pages)
    queries = stats.prefix_cache_queries - last.prefix_cache_queries
    hits = 100 * (stats.prefix_cache_hits - last.prefix_cache_hits) / max(1, queries)
    return (
        f"{stats.num_running} running, {stats.num_waiting} waiting; {prompt:.1f} prompt and {output:.1f} output "
        f"tokens/s; KV pages {pages:.1f} % used, prefix cache hits {hits:.1f} %"
    )
