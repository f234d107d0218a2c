"""Measure what a streamed token costs the front process."""

import argparse
import json

from paxserve.errors import ConfigError

USAGE = "--model MODEL [--streams N ...] [--tokens N]"
DESCRIPTION = """\
Measure the CPU time of the front process from the engine core's message to the bytes of a chat's events: decoding,
detokenising, JSON. No weights are loaded; one JSON object for each number of streams.

    paxserve bench front --model smollm2-135m-instruct --streams 1 64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose tokenizer, how many streams, how many tokens."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="as for paxserve serve; its tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[64], metavar="N", help="at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=500, metavar="N", help="of each stream (default: 500)")
    parser.add_argument("--stream-interval", type=int, default=1, metavar="N", help="tokens a chunk (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object a number of streams."""
    if min(*arguments.streams, arguments.tokens, arguments.stream_interval) < 1:
        raise ConfigError("--streams, --tokens and --stream-interval must be at least 1.")
    from paxserve.bench.front_cost import measure_front_cost  # late: loads FastAPI and the tokenizers

    for count in arguments.streams:
        print(json.dumps(measure_front_cost(arguments.model, count, arguments.tokens, arguments.stream_interval)))
    return 0
