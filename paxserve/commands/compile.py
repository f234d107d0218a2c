"""Compile a model's programs for a TPU slice into a folder of executables."""

import argparse
import os

from paxserve.errors import ConfigError
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments

USAGE = "MODEL --topology NAME --output FOLDER [flags]"
DESCRIPTION = """\
Compile the programs of an engine for a TPU slice that is not here, and write them as the engine keeps its own, so
that a TPU VM with the same versions of paxserve, jax and libtpu can start without compiling:

    paxserve compile ./config.json --topology v6e:1x1 --max-model-len 8k --output programs

The last line is the `paxserve serve` command whose programs these are. Whether a TPU loads them was never tried."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the slice, the folder, and every flag of the engine."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS,
        help="a config.json, a folder with one, a hub name, or a .gguf file",
    )  # fmt: skip
    parser.add_argument("--topology", metavar="NAME", help="the slice, such as v6e:2x4")
    parser.add_argument("--output", metavar="FOLDER", help="where to write the programs")
    parser.add_argument("--essential", action="store_true", help="only those that a start waits for")
    add_flags(parser, list(ENGINE_SECTIONS))


def run(arguments: argparse.Namespace) -> int:
    """Compile and write, a line a program."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run, so no device is looked for
    given = engine_arguments(arguments)
    if arguments.topology is None or arguments.output is None:
        raise ConfigError("compile needs --topology NAME, such as v6e:2x4, and --output FOLDER.")
    from paxserve.planning.executables import compile_programs  # late: loads jax

    return compile_programs(
        given, topology=arguments.topology, folder=arguments.output, is_essential=arguments.essential
    )
