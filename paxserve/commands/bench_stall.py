"""Measure how long a running request is held up by a long prompt."""

import argparse
import json

from paxserve.errors import ConfigError
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments

USAGE = "--model MODEL [--budgets N ... off] [--prompt-len N] [flags]"
DESCRIPTION = """\
Start one request; while it runs, send a long prompt; print the longest gap between two tokens of the first, once for
each budget of tokens a step (off: the whole prompt in one step), as one JSON object a line.

    paxserve bench stall --model smollm2-135m-instruct --budgets 64 256 1024 off"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The budgets, the prompt, and every flag of the engine."""
    group = parser.add_argument_group("stall")
    group.add_argument(
        "--budgets", nargs="+", default=["64", "256", "1024", "off"], metavar="N", help="default: 64 256 1024 off"
    )
    group.add_argument(
        "--prompt-len", type=int, default=3700, metavar="N", help="tokens of the long prompt (default: 3700)"
    )
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="arrivals for each budget (default: 3)")
    skip = ("max_num_batched_tokens", "enable_chunked_prefill", "max_num_seqs", "enable_prefix_caching")
    add_flags(parser, ENGINE_SECTIONS, skip=skip)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object a budget."""
    budgets = [_budget(text) for text in arguments.budgets]
    if arguments.repeats < 1 or arguments.prompt_len < 1:
        raise ConfigError("--repeats and --prompt-len must be at least 1.")
    flags = engine_arguments(arguments)
    from paxserve.bench.stall import measure_stall  # late: loads jax

    for budget in budgets:
        result = measure_stall(flags, budget, arguments.prompt_len, arguments.repeats)
        print(json.dumps(result), flush=True)
    return 0


def _budget(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdecimal() or int(text) < 2:
        raise ConfigError(f"A budget must be a number of tokens of at least 2, or off, got {text!r}.")
    return int(text)
