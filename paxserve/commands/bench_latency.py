"""Measure how long the engine takes for one batch, in this process."""

import argparse
from pathlib import Path

from paxserve.errors import ConfigError
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments

USAGE = "--model MODEL [--batch-size N] [--input-len N] [--output-len N] [flags]"
DESCRIPTION = """\
Measure how long one batch takes from its start to its end, without a server.

    paxserve bench latency --model smollm2-135m-instruct --batch-size 1 --input-len 128 --output-len 128

Every run has other random prompts, so that the prefix cache does not help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The batch, the number of runs, and every flag of the engine."""
    batch = parser.add_argument_group("batch")
    batch.add_argument("--batch-size", type=int, default=8, metavar="N", help="requests (default: 8)")
    batch.add_argument("--input-len", type=int, default=32, metavar="N", help="prompt tokens of each (default: 32)")
    batch.add_argument("--output-len", type=int, default=128, metavar="N", help="output tokens of each (default: 128)")
    batch.add_argument(
        "--random-vocab-size", type=int, default=10_000, metavar="N", help="ids are below this (default: 10000)"
    )
    batch.add_argument("--num-iters", type=int, default=10, metavar="N", help="measured runs (default: 10)")
    batch.add_argument("--num-iters-warmup", type=int, default=2, metavar="N", help="runs before them (default: 2)")
    batch.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures as JSON")
    add_flags(parser, ENGINE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Run the batches and print the figures."""
    for name in ("batch_size", "input_len", "output_len", "num_iters"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}.")
    engine = engine_arguments(arguments)
    from paxserve.bench import offline, report  # late: loads jax

    result = offline.measure_latency(
        offline.LLM(**engine),
        batch_size=arguments.batch_size,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        vocab_size=arguments.random_vocab_size,
        num_iters=arguments.num_iters,
        num_warmup=arguments.num_iters_warmup,
    )
    print(
        f"{result['batch_size']} x ({result['input_len']} in, {result['output_len']} out): "
        f"mean {result['mean_latency_ms']:.1f} ms, median {result['p50_latency_ms']:.1f} ms, "
        f"p90 {result['p90_latency_ms']:.1f} ms, p99 {result['p99_latency_ms']:.1f} ms, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    if arguments.output_json:
        report.save(arguments.output_json, result)
    return 0
