"""Measure what a step costs the host."""

import argparse
import json

from paxserve.errors import ConfigError

USAGE = "[--rows N ...] [--steps N]"
DESCRIPTION = """\
Measure the Python that a decode step costs beside the device: planning it, packing it, taking in its tokens, and
writing the message for the front process. Two JSON objects for each number of rows: while no row joins or leaves, and
with one that leaves and one that joins in every step. No model is loaded.

    paxserve bench host --rows 1 64 256"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many rows, how many steps."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], metavar="N", help="default: 1 64 256")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps to measure (default: 200)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print two JSON objects a number of rows."""
    if min(arguments.rows) < 1 or arguments.steps < 1:
        raise ConfigError("--rows and --steps must be at least 1.")
    from paxserve.bench.host_cost import measure_host_cost  # late, as numpy loads slowly

    for num_rows in arguments.rows:
        for is_changing in (False, True):
            print(json.dumps(measure_host_cost(num_rows, arguments.steps, is_changing=is_changing)), flush=True)
    return 0
