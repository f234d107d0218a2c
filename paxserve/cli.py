"""The `paxserve` command: one subcommand for each module of `paxserve.commands`.

The commands' modules import what they run on inside their `run`: loading jax, transformers or FastAPI takes
seconds, and neither `--help` nor a mistyped flag should wait for them.
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from paxserve import commands
from paxserve.arguments import expand
from paxserve.errors import PaxserveError
from paxserve.flags import FlagParser

DESCRIPTION = """\
LLM inference and serving in JAX: an OpenAI-compatible server, and the same engine without one.

    paxserve serve smollm2-135m-instruct      serve the demo model on http://127.0.0.1:8000
    paxserve chat --model FOLDER              talk to a model in the terminal
    paxserve COMMAND --help                   what a command takes"""

GROUPS = {"bench": "Measure throughput, latency, and servers."}
"""Summaries of the first words of two-word commands (`bench_serve` is `paxserve bench serve`)."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def command_modules() -> dict[tuple[str, ...], ModuleType]:
    """The module of every command, by the words that call it."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    return {words_of(name): importlib.import_module(f"{commands.__name__}.{name}") for name in names}


def words_of(module_name: str) -> tuple[str, ...]:
    """The words that call a command: `bench_serve` is `bench serve`, `run_batch` is `run-batch`."""
    first, _, rest = module_name.partition("_")
    return (first, rest) if first in GROUPS else (module_name.replace("_", "-"),)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; a parsed namespace has `run`, the chosen command's function."""
    parser = FlagParser(prog="paxserve", description=DESCRIPTION)
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    subparsers: dict[tuple[str, ...], Any] = {
        (): parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=FlagParser)
    }
    parser.set_defaults(run=None, parser=parser)
    for words, module in command_modules().items():
        *group, name = words
        if tuple(group) not in subparsers:
            summary = GROUPS[group[0]]
            holder = subparsers[()].add_parser(group[0], help=summary, description=summary)
            holder.set_defaults(run=None, parser=holder)
            subparsers[tuple(group)] = holder.add_subparsers(title="commands", metavar="COMMAND")
        summary = (module.__doc__ or "").splitlines()[0]
        command = subparsers[tuple(group)].add_parser(
            name, help=summary, description=module.DESCRIPTION, usage=f"paxserve {' '.join(words)} {module.USAGE}"
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 (failed), 2 (wrong arguments or configuration) or 130 (Ctrl-C)."""
    try:
        complete = expand(sys.argv[1:] if arguments is None else arguments)
    except PaxserveError as error:
        sys.stderr.write(f"paxserve: {error}\n")
        return 2
    parsed = build_parser().parse_args(complete)
    if parsed.version:
        from paxserve.commands import version

        return version.run(parsed)
    if parsed.run is None:
        parsed.parser.print_help()
        return 2
    try:
        return parsed.run(parsed)
    except PaxserveError as error:
        sys.stderr.write(f"paxserve: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output (head, less) has gone: no traceback about it
        return 1
