"""Serve a model over HTTP, with OpenAI's API."""

import argparse

from paxserve.flags import SECTIONS, add_flags, engine_config, server_config

USAGE = "MODEL [flags]"
DESCRIPTION = """\
Serve a model over HTTP, with OpenAI's API.

    paxserve serve smollm2-135m-instruct
    paxserve serve ./my-model --port 9000 --max-model-len 32k --api-key secret

Then: curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}]}'

Flags are named as vLLM's are; --some-flag and --some_flag are the same, and --some-json.key VALUE sets one key of
a flag that takes JSON. --config FILE.yaml has flags and values too, and so has the environment
(PAXSERVE_MAX_MODEL_LEN=4096); what is typed wins. --help=WORD shows the flags that have to do with a word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and every flag of the engine and the server."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="Hugging Face folder or hub name, .gguf file, or smollm2-135m-instruct (a small demo model)",
    )
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with flags and values")
    add_flags(parser, list(SECTIONS))


def run(arguments: argparse.Namespace) -> int:
    """Run the server until it is told to stop."""
    engine, server = engine_config(arguments), server_config(arguments)
    from paxserve.entrypoints.serve import run_server  # late: loads FastAPI, jax and transformers

    return run_server(engine, server) or 0
