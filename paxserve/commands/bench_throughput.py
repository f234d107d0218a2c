"""Measure how many tokens a second the engine makes, in this process."""

import argparse
import json
from pathlib import Path

from paxserve.commands.bench_serve import add_dataset_arguments, read_dataset
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments

USAGE = "--model MODEL [--dataset random|FILE] [flags]"
DESCRIPTION = """\
Measure the engine without a server: all requests are given at once, and every output has its full length.

    paxserve bench throughput --model smollm2-135m-instruct --num-prompts 64 --random-input-len 256"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The data set, where results go, and every flag of the engine."""
    add_dataset_arguments(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures as JSON")
    add_flags(parser, ENGINE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Run the requests and print the figures."""
    requests, engine = read_dataset(arguments), engine_arguments(arguments)
    from paxserve.bench import offline, report  # late: loads jax

    result = offline.measure_throughput(offline.LLM(**engine), requests)
    print(
        f"{result['num_requests']} requests, {result['total_input_tokens']} tokens in and "
        f"{result['total_output_tokens']} out, in {result['elapsed_time']:.2f} s: "
        f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    if arguments.output_json:
        report.save(arguments.output_json, {"engine": json.loads(json.dumps(engine, default=str))} | result)
    return 0
