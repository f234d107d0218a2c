"""The sampling parameters as command-line flags, for the commands that make text themselves."""

import argparse
from typing import Any

FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to make"),
    "temperature": (float, "0 always takes the likeliest token; higher is more varied"),
    "top_p": (float, "sample among the likeliest tokens that add up to this probability"),
    "top_k": (int, "sample among this many of the likeliest tokens"),
    "min_p": (float, "leave out tokens below this share of the likeliest one's probability"),
    "presence_penalty": (float, "lower the tokens that have come"),
    "frequency_penalty": (float, "lower the tokens that have come, each time more"),
    "repetition_penalty": (float, "divide the odds of tokens that have come, in the prompt too"),
}
"""Every sampling flag: its type and its help."""


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; one that is not given leaves no attribute, so that the model's own default holds."""
    group = parser.add_argument_group("sampling", "Defaults are the model's own, else SamplingParams'.")
    for name, (kind, text) in FLAGS.items():
        option, metavar = "--" + name.replace("_", "-"), "N" if kind is int else "X"
        group.add_argument(option, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--stop", nargs="+", action="extend", metavar="TEXT", default=argparse.SUPPRESS, help="end before any of these"
    )
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on after the end token")


def sampling_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given."""
    return {name: value for name, value in vars(arguments).items() if name in {*FLAGS, "stop", "ignore_eos"}}
