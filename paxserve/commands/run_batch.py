"""Answer a file of requests and write a file of answers."""

import argparse
from pathlib import Path

from paxserve.flags import SECTIONS, add_flags, engine_config, server_config

USAGE = "-i FILE -o FILE [MODEL] [flags]"
DESCRIPTION = """\
Answer a file of requests and write a file of answers, without a server.

    paxserve run-batch -i requests.jsonl -o answers.jsonl --model smollm2-135m-instruct

Both have one JSON object a line, as in OpenAI's batches: {"custom_id": "1", "method": "POST",
"url": "/v1/chat/completions", "body": {"messages": [...]}}. Answers are written as they come. Run again with the
same files after an interruption, it goes on where it stopped: what has its answer is not asked again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, MODEL, and every flag of the engine and the server."""
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one a line")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="answers, one a line")
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="as for paxserve serve")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with flags and values")
    add_flags(parser, list(SECTIONS))


def run(arguments: argparse.Namespace) -> int:
    """Answer them all; 1 if some got none."""
    engine, server = engine_config(arguments), server_config(arguments)
    from paxserve.entrypoints.batch_runner import run_batch  # late: loads FastAPI and the tokenizers

    return run_batch(engine, server, arguments.input_file, arguments.output_file)
