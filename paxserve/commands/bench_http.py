"""Measure what HTTP adds to the engine's own time."""

import argparse
import json

from paxserve.errors import ConfigError

USAGE = "MODEL [--workload W1|W2] [--rounds N] [-- FLAGS OF paxserve serve]"
DESCRIPTION = """\
Run the same requests offline and through a server, each with a stream of its own, in turns; print the seconds as JSON.

    paxserve bench http smollm2-135m-instruct
    paxserve bench http smollm2-135m-instruct --workload W2 --rounds 5

Engine and server both have the model in memory. Flags after a -- are the server's alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the requests, how often."""
    parser.add_argument("model", metavar="MODEL", help="as for paxserve serve")
    parser.add_argument("serve_arguments", metavar="FLAGS", nargs="*", help="flags for paxserve serve, after a --")
    parser.add_argument("--workload", choices=("W1", "W2", "W4"), default="W1", help="its requests (default: W1)")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only the first N of them")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured rounds (default: 3)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="X", help="seconds to wait for the start")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object."""
    from paxserve.bench import datasets, http_overhead  # late, as httpx and jax load slowly
    from paxserve.llm import LLM

    for name in ("rounds", "num_prompts"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    requests = datasets.read_workload(arguments.workload, 1.0)[: arguments.num_prompts]
    llm = LLM(arguments.model)
    result = http_overhead.measure_overhead(
        arguments.model, arguments.serve_arguments, llm, requests, arguments.rounds, arguments.timeout
    )
    print(json.dumps({"workload": arguments.workload, "num_requests": len(requests)} | result, indent=1))
    return 0
