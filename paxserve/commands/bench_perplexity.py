"""Measure how well a model predicts a text, with this engine's settings."""

import argparse
import json
from pathlib import Path

from paxserve.flags import ENGINE_SECTIONS, add_flags, engine_arguments

USAGE = "FILE --model MODEL [--context-len N] [flags]"
DESCRIPTION = """\
Perplexity of a text file, or of the prompts of a .jsonl file, printed as JSON; lower is better.

    paxserve bench perplexity book.txt --model smollm2-135m-instruct --context-len 1024
    paxserve bench perplexity book.txt --model smollm2-135m-instruct --context-len 1024 --kv-cache-dtype int8

The text is cut into windows that are predicted each on its own, so that runs differ by their settings alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text, how it is cut, and every flag of the engine."""
    parser.add_argument("file", type=Path, metavar="FILE", help="UTF-8 text, or .jsonl rows with a prompt")
    parser.add_argument("--context-len", type=int, default=1024, metavar="N", help="tokens of a window (default: 1024)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="use only the first N tokens (default: all)")
    add_flags(parser, ENGINE_SECTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print one JSON object."""
    engine = engine_arguments(arguments)
    from paxserve.bench import perplexity  # late: loads jax

    texts = perplexity.read_texts(arguments.file)
    llm = perplexity.LLM(**engine)
    pieces = perplexity.windows(llm, texts, arguments.context_len, arguments.max_tokens)
    print(json.dumps(perplexity.measure_perplexity(llm, pieces)))
    return 0
