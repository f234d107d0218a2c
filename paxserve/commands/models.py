"""List the model families that can be run, and what was checked of each."""

import argparse
import json
from pathlib import Path

from models import architectures, named_architecture
from models.verified import Verified, read_verified
from paxserve.errors import ConfigError

USAGE = "[MODEL_TYPE or FOLDER] [--json]"
DESCRIPTION = """\
List the model families that can be run, by the model_type in a checkpoint's config.json, and what was checked of each.

    paxserve models
    paxserve models qwen3
    paxserve models ./my-model

With a model_type, or a folder with a config.json, that family alone; one that cannot be run is an error."""

HEADINGS = ("model_type", "text as transformers", "vectors, classes", "published sizes", "real weights")
SAYS = "Tiny checkpoints compared with transformers in float32, configurations of published sizes, and real weights."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One family, and the output's form."""
    parser.add_argument("model", metavar="MODEL_TYPE", nargs="?", help="a model_type, or a folder with a config.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    table = read_verified()
    names = [_supported(arguments.model)] if arguments.model else architectures()
    entries = {name: table.get(name, Verified()) for name in names}
    if arguments.json:
        print(json.dumps({name: entry.as_dict() for name, entry in entries.items()}, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    shown = Table(*HEADINGS, box=None, pad_edge=False, caption=SAYS, caption_justify="left")
    for name, entry in entries.items():
        cells = (entry.goldens, entry.pooling, entry.sizes, entry.real)
        shown.add_row(name, *(", ".join(cell) or "-" for cell in cells))
    Console().print(shown)
    return 0


def _supported(model: str) -> str:
    """The family's name. Raises `ConfigError` if there is none."""
    path = Path(model).expanduser()
    model_type = model
    if path.is_dir():
        try:
            model_type = json.loads((path / "config.json").read_bytes())["model_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} has no config.json with a model_type: {error!r}.") from None
    try:
        return named_architecture(model_type)
    except ValueError as error:
        raise ConfigError(str(error)) from None
