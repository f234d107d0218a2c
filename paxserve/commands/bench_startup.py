"""Measure the time from launch to first token."""

import argparse
import json

USAGE = "MODEL [--runs N] [--cold] [-- FLAGS OF paxserve serve]"
DESCRIPTION = """\
Start a server, ask for one token, stop it; print the time from launch and the peak memory as JSON.

    paxserve bench startup smollm2-135m-instruct --cold
    paxserve bench startup smollm2-135m-instruct --runs 3 -- --max-num-seqs 16

The model has to be on this machine already, else its download is measured too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how often, and what `paxserve serve` is given besides."""
    parser.add_argument("model", metavar="MODEL", help="as for paxserve serve")
    parser.add_argument("serve_arguments", metavar="FLAGS", nargs="*", help="flags for paxserve serve, after a --")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="starts to measure (default: 1)")
    parser.add_argument("--cold", action="store_true", help="without programs compiled by earlier starts")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="X", help="seconds to wait (default: 600)")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object a start."""
    from paxserve.bench.startup import measure_startup  # late, as httpx loads slowly

    for _ in range(arguments.runs):
        result = measure_startup(
            arguments.model, arguments.serve_arguments, is_cold=arguments.cold, timeout=arguments.timeout
        )
        print(json.dumps(result), flush=True)
    return 0
