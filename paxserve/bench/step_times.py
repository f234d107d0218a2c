"""How long a step takes: a table of step sizes, and what attention adds for what the rows look at."""

import json
from bisect import bisect_right
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.step_plan import ScheduledStep
from paxserve.errors import ConfigError

OWN_TABLES = ("smollm2-135m-cpu", "opt-13b-a100")
"""Tables that paxserve brings, in `paxserve/bench/data`."""

FIELDS = {"description", "kv_tokens", "step_seconds", "seconds_per_decode_context_token", "seconds_per_prefill_pair"}


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step: interpolated by its tokens, plus attention in proportion to the keys that are read."""

    description: str
    kv_tokens: int
    """Tokens that the KV pool of this device holds."""
    points: tuple[tuple[int, float], ...]
    """(tokens, seconds) of steps without attention, by rising number of tokens."""
    per_context_token: float
    """Seconds for each token of context of a row that computes one token."""
    per_prefill_pair: float
    """Seconds for each pair of a query and a key in rows that compute several."""

    def seconds(self, step: ScheduledStep | DecodeStep, num_idle_rows: int = 0) -> float:
        """How long the step takes, on so many more rows that compute and are thrown away."""
        if isinstance(step, DecodeStep):
            # Each of its iterations computes all rows, those too that have ended.
            context = int(step.starts.sum(dtype=np.int64)) + step.num_rows * (step.count - 1) / 2
            return step.count * (self.products(num_idle_rows + step.num_rows) + self.per_context_token * context)
        num_tokens, context, pairs = num_idle_rows, 0, 0
        for row in step.rows:
            count = row.num_tokens
            num_tokens += count
            if count == 1:
                context += row.start
            else:
                pairs += count * (row.start + (count + 1) // 2)
        return self.products(num_tokens) + self.per_context_token * context + self.per_prefill_pair * pairs

    def products(self, num_tokens: int) -> float:
        """How long everything but attention takes; beyond the table its last slope goes on."""
        points = self.points
        place = min(max(1, bisect_right(points, (num_tokens, 0.0))), len(points) - 1)
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        return max(y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0), points[0][1])


def read_step_times(source: str) -> StepTimes:
    """One of `OWN_TABLES`, or a JSON file like them. Raises `ConfigError` naming what is wrong."""
    is_own = source in OWN_TABLES
    path = files("paxserve.bench") / "data" / f"{source}.json" if is_own else Path(source)
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if table.keys() - FIELDS:
            raise ConfigError(f"{source}: unknown field {min(table.keys() - FIELDS)!r}.")
        points = tuple(sorted((int(tokens), float(seconds)) for tokens, seconds in table["step_seconds"].items()))
        times = StepTimes(
            description=str(table.get("description", source)),
            kv_tokens=int(table["kv_tokens"]),
            points=points,
            per_context_token=float(table["seconds_per_decode_context_token"]),
            per_prefill_pair=float(table["seconds_per_prefill_pair"]),
        )
    except OSError as error:
        raise ConfigError(
            f"Cannot read the step times {source}: {error.strerror}. Own tables: {', '.join(OWN_TABLES)}."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is no table of step times: {error!r}.") from None
    if len(points) < 2 or any(seconds <= 0 for _, seconds in points):
        raise ConfigError(f"{source}: step_seconds needs two sizes or more, with seconds above 0.")
    return times
