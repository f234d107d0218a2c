"""What `paxserve plan` and `paxserve compile` share: settings as described engines."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from paxserve.config import EngineConfig
from paxserve.errors import ConfigError
from paxserve.planning.described_engine import DescribedEngine, describe_engine, describe_slice, read_hf_config
from paxserve.planning.plan import as_json, make_plan
from paxserve.planning.report import make_console, print_plan, print_slices
from paxserve.planning.slices import compare_slices
from sharding.topology import CHIPS

DEFAULT_CONTEXT = 1024


def engine_for(given: Mapping[str, Any], topology: str) -> DescribedEngine:
    """The engine that the flags make on the slice; all its devices share each layer unless they say otherwise."""
    described = describe_slice(topology)
    flags = {"tensor_parallel_size": described.num_devices} | dict(given)
    config = EngineConfig.from_flags(**flags)
    hf_config = read_hf_config(config.model)
    return describe_engine(config, hf_config, described)


def print_one(
    given: Mapping[str, Any], *, topology: str, context: int | None, num_operations: int, is_json: bool, **_: Any
) -> int:
    """Compile and print the plan of one slice."""
    engine = engine_for(given, topology)
    context = min(context or DEFAULT_CONTEXT, engine.max_model_len)
    plan = make_plan(engine, context=context, report=lambda line: print(line, file=sys.stderr, flush=True))
    if is_json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print_plan(plan, given, num_operations=num_operations, console=make_console())
    return 0


def print_all(
    given: Mapping[str, Any], *, prices: Mapping[str, float], context: int | None, is_json: bool, **_: Any
) -> int:
    """Print which slices are enough."""
    unknown = [name for name in prices if name not in CHIPS]
    if unknown:
        raise ConfigError(f"--price knows the generations {', '.join(CHIPS)}, got {unknown[0]!r}.")
    config = EngineConfig.from_flags(**given)
    answers = compare_slices(config, read_hf_config(config.model), prices=prices, context=context or DEFAULT_CONTEXT)
    if is_json:
        print(json.dumps([dataclasses.asdict(answer) for answer in answers], indent=2))
    else:
        print_slices(answers, make_console())
    return 0
