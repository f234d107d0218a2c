"""Print the version of paxserve."""

import argparse

from paxserve import __version__

DESCRIPTION = "Print the version of paxserve."
USAGE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Print the version."""
    print(__version__)
    return 0
