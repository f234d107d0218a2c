"""Rewrite a checkpoint in the engine's own layout, which loads faster."""

import argparse
import time
from pathlib import Path

from paxserve.config import ModelConfig
from paxserve.flags import add_flags, model_config

USAGE = "MODEL OUT [flags]"
DESCRIPTION = """\
Rewrite a checkpoint in the engine's own layout, which loads faster: an Orbax checkpoint, for any number of devices.

    paxserve convert Qwen/Qwen3-0.6B ./qwen3-0.6b
    paxserve convert model.gguf ./model --dtype bfloat16
    paxserve serve ./qwen3-0.6b

Configuration and tokenizer are copied beside it. Weights keep the checkpoint's type unless --dtype says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, OUT, and the flags that say how the model is read."""
    parser.add_argument("model", metavar="MODEL", help="Hugging Face folder or hub name, or .gguf file")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write, which must be new or empty")
    add_flags(parser, [ModelConfig], skip=["model"])


def run(arguments: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    settings = model_config(arguments)
    from paxserve.conversion import convert  # late: loads jax

    started = time.perf_counter()
    written = convert(settings, arguments.out)
    seconds = time.perf_counter() - started
    print(f"{arguments.out}: {written['arrays']} arrays, {written['bytes'] / 2**30:.2f} GiB, {seconds:.1f} s")
    return 0
