"""Measure what sharing pages saves when a prompt has several outputs."""

import argparse
import json

from paxserve.beam_search_params import MAX_BEAM_WIDTH
from paxserve.errors import ConfigError

USAGE = "[--dataset sharegpt|alpaca ...] [--outputs N ...] [flags]"
DESCRIPTION = """\
Run prompts with several outputs (n choices, or beams) through the real scheduler and page pool, with random tokens in a
model's place, and print how many pages are saved against outputs that each had pages of their own: one JSON object for
each data set, way and number of outputs.

    paxserve bench sharing --dataset alpaca sharegpt --outputs 2 4 6"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long, how many."""
    parser.add_argument(
        "--dataset", nargs="+", default=["alpaca", "sharegpt"], choices=("alpaca", "sharegpt"), metavar="NAME",
        help="lengths of prompts and outputs (default: alpaca sharegpt)",
    )  # fmt: skip
    parser.add_argument(
        "--outputs", type=int, nargs="+", default=[2, 4, 6], metavar="N", help="outputs a prompt (default: 2 4 6)"
    )
    parser.add_argument("--num-prompts", type=int, default=50, metavar="N", help="prompts to draw (default: 50)")
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens that a page holds (default: 16)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of lengths and tokens (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a JSON object a line."""
    if not 1 <= min(arguments.outputs) <= max(arguments.outputs) <= MAX_BEAM_WIDTH:
        raise ConfigError(f"--outputs must be between 1 and {MAX_BEAM_WIDTH}.")
    if min(arguments.num_prompts, arguments.block_size) < 1:
        raise ConfigError("--num-prompts and --block-size must be at least 1.")
    from paxserve.bench import sharing, trace  # late, as numpy loads slowly

    for name in arguments.dataset:
        for is_beam_search in (False, True):
            for num_outputs in arguments.outputs:
                result = sharing.measure_sharing(
                    trace.LENGTHS[name], arguments.num_prompts, num_outputs, is_beam_search=is_beam_search,
                    page_size=arguments.block_size, seed=arguments.seed,
                )  # fmt: skip
                print(json.dumps({"dataset": name} | result), flush=True)
    return 0
