"""Plan a model on a TPU slice: what fits, how fast it would be."""

import argparse
import os

from paxserve.errors import ConfigError
from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments

USAGE = "MODEL (--topology NAME | --all) [flags]"
DESCRIPTION = """\
Compile a model's steps for a TPU slice that is not here, from its config.json alone, with the real compiler
(pip install "jax[tpu]"; Linux): what fits in its memory, how many requests, estimated times. No weights, no TPU.

    paxserve plan meta-llama/Llama-3.1-8B --topology v6e:1x1
    paxserve plan ./config.json --topology v6e:2x4 --max-model-len 16k --json
    paxserve plan ./config.json --all --price v6e=2.70 v5e=1.20

Topologies are named as libtpu does: v5e:2x2, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1 …; all its devices share each layer
unless --tensor-parallel-size says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the slice, and every flag of the engine."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS,
        help="a config.json, a folder with one, a hub name, or a .gguf file",
    )  # fmt: skip
    parser.add_argument("--topology", metavar="NAME", help="the slice, such as v6e:2x4")
    parser.add_argument("--all", action="store_true", help="compare all slices of tpu_configs, by arithmetic")
    parser.add_argument(
        "--price", nargs="+", default=[], metavar="GENERATION=X", help="price of a chip hour, for --all"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of context to estimate decode at (default: 1024)"
    )
    parser.add_argument("--operations", type=int, default=0, metavar="N", help="show the N most expensive operations")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, list(ENGINE_SECTIONS))


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run, so no device is looked for
    given = engine_arguments(arguments)
    if (arguments.topology is None) == (not arguments.all):
        raise ConfigError("Which slice? Give either --topology NAME, such as v6e:2x4, or --all.")
    prices = dict(map(_price, arguments.price))
    from paxserve.planning import command  # late: loads jax

    status = command.print_all if arguments.all else command.print_one
    return status(
        given,
        topology=arguments.topology,
        prices=prices,
        context=arguments.context,
        num_operations=arguments.operations,
        is_json=arguments.json,
    )


def _price(text: str) -> tuple[str, float]:
    generation, _, price = text.partition("=")
    try:
        return generation, float(price)
    except ValueError:
        raise ConfigError(f"--price takes GENERATION=X, such as v6e=2.70, got {text!r}.") from None
