"""Measure how long a long prompt takes to its first token when its pages are elsewhere."""

import argparse
import json
import tempfile
from pathlib import Path

from paxserve.errors import ConfigError
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments

USAGE = "--model MODEL [--prompt-len N] [--rounds N] [--folder FOLDER] [flags]"
DESCRIPTION = """\
Send a long prompt that is new; again while its pages are on the device; again when other prompts have pushed them out
into host memory; and again when they are only on disk. Print the times to the first token, medians over rounds: JSON.

    paxserve bench offload --model smollm2-135m-instruct --num-gpu-blocks-override 230

Without --num-gpu-blocks-override the pool has its usual size, which takes more prompts to fill."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, where its pages go, and every flag of the engine."""
    group = parser.add_argument_group("offload")
    group.add_argument("--prompt-len", type=int, default=1601, metavar="N", help="tokens of it (default: 1601)")
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="after one to warm up (default: 3)")
    group.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="where pages are written (default: a temporary one)"
    )
    skip = ("max_num_seqs", "enable_prefix_caching", "kv_offloading_disk_path")
    add_flags(parser, ENGINE_SECTIONS, skip=skip)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object."""
    if arguments.rounds < 1 or arguments.prompt_len < 2:
        raise ConfigError("--rounds must be at least 1 and --prompt-len at least 2.")
    flags = {"kv_offloading_size": 1.0, **engine_arguments(arguments)}
    from paxserve.bench.offload import measure_offload  # late: loads jax

    with tempfile.TemporaryDirectory(prefix="paxserve-pages-", dir=arguments.folder) as folder:
        flags["kv_offloading_disk_path"] = folder
        print(json.dumps(measure_offload(flags, arguments.prompt_len, arguments.rounds)))
    return 0
