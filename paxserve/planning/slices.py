"""The slices that `tpu_configs` has, and which are enough for a model: by arithmetic, nothing is compiled."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from paxserve.config import EngineConfig
from paxserve.errors import ConfigError
from paxserve.planning.described_engine import describe_engine, describe_slice
from paxserve.planning.step_time import decode_work, roofline
from sharding.topology import Topology


@dataclass(frozen=True, kw_only=True)
class SliceAnswer:
    """Whether one slice is enough, and what it would do at best."""

    name: str
    """Of the file in `tpu_configs`, such as "v6e-8"."""
    topology: str
    num_chips: int
    tensor_parallel_size: int
    price_per_hour: float | None
    """Of the whole slice, where a price of its chips is known."""
    refusal: str | None
    """Why it is not enough; None when it is."""
    weight_bytes: int = 0
    """Of one device."""
    num_pages: int = 0
    full_length_requests: float = 0.0
    roofline_tokens_per_second: float = 0.0
    """Of a decode step with all rows, at the floor that the chip sets."""


def load_slices() -> dict[str, dict[str, Any]]:
    """The contents of every file of `tpu_configs`, by its name."""
    files = [file for file in resources.files("tpu_configs").iterdir() if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): tomllib.loads(file.read_text()) for file in files}


def slice_name(topology: Topology) -> str | None:
    """The name of the `tpu_configs` entry for a topology, if there is one."""
    return next((name for name, data in load_slices().items() if data["topology"] == topology.name), None)


def compare_slices(
    config: EngineConfig,
    hf_config: dict[str, Any],
    *,
    prices: Mapping[str, float],
    context: int,
) -> list[SliceAnswer]:
    """An answer for every slice: those that are enough first, the cheapest (or those of the fewest chips) first."""
    answers = []
    for name, data in load_slices().items():
        topology = describe_slice(data["topology"])
        price = prices.get(topology.chip.generation)
        shards = data["mesh"]["tensor"]
        answer = SliceAnswer(
            name=name, topology=topology.name, num_chips=topology.num_chips, tensor_parallel_size=shards,
            price_per_hour=None if price is None else price * topology.num_chips, refusal=None,
        )  # fmt: skip
        try:
            own = dataclasses.replace(
                config, parallel=dataclasses.replace(config.parallel, tensor_parallel_size=shards)
            )
            engine = describe_engine(own, hf_config, topology)
        except (ConfigError, ValueError) as error:
            answers.append(dataclasses.replace(answer, refusal=str(error)))
            continue
        work = decode_work(min(own_rows(engine.config), max(1, int(engine.requests_of(context)))), context)
        refusal = None
        if engine.full_length_requests < 1:
            most = engine.longest_request
            refusal = f"one request of {engine.max_model_len} tokens does not fit: --max-model-len {most} would."
        answers.append(
            dataclasses.replace(
                answer,
                refusal=refusal,
                weight_bytes=engine.weight_bytes,
                num_pages=engine.num_pages,
                full_length_requests=engine.full_length_requests,
                roofline_tokens_per_second=work.num_tokens / roofline(engine, work),
            )  # fmt: skip
        )
    return sorted(answers, key=lambda a: (a.refusal is not None, a.price_per_hour or float("inf"), a.num_chips, a.name))


def own_rows(config: EngineConfig) -> int:
    """Most rows of a step."""
    return config.scheduler.limits[0]
