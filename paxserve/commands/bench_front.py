"""Measure what a streamed token costs the front process."""

import argparse
import json

from paxserve.errors import ConfigError

USAGE = "--model MODEL [--streams N ...] [--tokens N] [--fronts N]"
DESCRIPTION = """\
Measure the CPU time of the front process from the engine core's message to the bytes of a chat's events: decoding,
detokenising, JSON. No weights are loaded; one JSON object for each number of streams.

    paxserve bench front --model smollm2-135m-instruct --streams 1 64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose tokenizer, how many streams, how many tokens."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="as for paxserve serve; its tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[64], metavar="N", help="at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=500, metavar="N", help="of each stream (default: 500)")
    parser.add_argument("--fronts", type=int, default=1, metavar="N", help="processes that share them (default: 1)")
    parser.add_argument("--stream-interval", type=int, default=1, metavar="N", help="tokens a chunk (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object a number of streams."""
    if min(*arguments.streams, arguments.tokens, arguments.stream_interval, arguments.fronts) < 1:
        raise ConfigError("--streams, --tokens, --stream-interval and --fronts must be at least 1.")
    if min(arguments.streams) < arguments.fronts:
        raise ConfigError("--streams must be at least --fronts: each has one or more.")
    from paxserve.bench.front_cost import measure_front_cost, measure_fronts  # late: loads FastAPI and the tokenizers

    for count in arguments.streams:
        order = (arguments.model, count, arguments.tokens, arguments.stream_interval)
        several = arguments.fronts > 1
        print(json.dumps(measure_fronts(*order, arguments.fronts) if several else measure_front_cost(*order)))
    return 0
