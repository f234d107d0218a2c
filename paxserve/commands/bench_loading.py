"""Measure how long weights take to load, from safetensors and converted."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from paxserve.config import ModelConfig, parse_size

USAGE = "[MODEL] [--size SIZE] [--runs N]"
DESCRIPTION = """\
Load a model's weights and nothing else, each time in a process of its own; print seconds, bytes of weights and the most
memory the host held beyond them, as JSON.

    paxserve bench loading ./my-model
    paxserve bench loading --size 2G --runs 3       a made-up checkpoint in shards, and the same converted, in turn

Later runs read from the system's file cache: with --runs, look at the second and those after it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to load, and how often."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a checkpoint on this machine")
    parser.add_argument("--size", default="2G", metavar="SIZE", help="size of the made-up checkpoint (default: 2G)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="where to make it (default: the system's)")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="times to load each (default: 1)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--layer-execution", default="looped", choices=["looped", "scanned", "unrolled"])
    parser.add_argument("--here", action="store_true", help="load once, in this process")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object a load."""
    if arguments.here:
        return _load_here(arguments)
    if arguments.model is not None:
        _load_in_turn([Path(arguments.model)], arguments)
        return 0
    from paxserve.bench.loading import scratch_folder, write_checkpoint  # late: loads jax
    from paxserve.conversion import convert

    with scratch_folder(arguments.folder) as scratch:
        plain, converted = Path(scratch, "safetensors"), Path(scratch, "converted")
        plain.mkdir()
        write_checkpoint(plain, parse_size(arguments.size, "size"))
        convert(ModelConfig(model=str(plain)), converted)
        _load_in_turn([plain, converted], arguments)
    return 0


def _load_in_turn(models: list[Path], arguments: argparse.Namespace) -> None:
    options = ["--here", "--dtype", arguments.dtype, "--layer-execution", arguments.layer_execution]
    for _ in range(arguments.runs):
        for model in models:
            subprocess.run([sys.executable, "-m", "paxserve", "bench", "loading", str(model), *options], check=True)


def _load_here(arguments: argparse.Namespace) -> int:
    from paxserve.bench.loading import measure_load  # late: loads jax

    result = measure_load(
        ModelConfig(model=arguments.model), dtype=arguments.dtype, layer_execution=arguments.layer_execution
    )
    print(json.dumps({"model": Path(arguments.model).name, **result}), flush=True)
    return 0
