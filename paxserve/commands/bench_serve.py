"""Measure an OpenAI-compatible server under load."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from paxserve.config import environment_api_key
from paxserve.errors import ConfigError

USAGE = "[--base-url URL] [--dataset random|FILE] [flags]"
DESCRIPTION = """\
Measure an OpenAI-compatible server (paxserve, vLLM, any other) under load.

    paxserve bench serve --num-prompts 100 --random-input-len 256 --random-output-len 128
    paxserve bench serve --base-url http://host:8000 --dataset prompts.jsonl --request-rate 4 --plot load.png

A JSONL data set has rows such as {"prompt": "...", "max_tokens": 64} or {"prompt_token_ids": [1, 2, 3]}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server, the data set, the load, and where results go."""
    add_server_arguments(parser)
    add_dataset_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="X", help="arrivals a second (default: all at once)"
    )
    load.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="1: Poisson arrivals, less: burstier (default: 1)"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data and arrivals (default: 0)")
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in flight (default: no limit)")
    load.add_argument("--ignore-eos", action="store_true", help="let every output reach its full length")
    load.add_argument(
        "--endpoint",
        choices=("/v1/completions", "/v1/chat/completions"),
        default="/v1/completions",
        help="the route to measure; chat needs text prompts (default: /v1/completions)",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--save-result", type=Path, metavar="FILE", help="write all figures, each request's too, as JSON"
    )
    results.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the run as .png, .svg or .pdf (needs matplotlib)"
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server and model; shared with `paxserve bench workload`."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="address (default: http://127.0.0.1:8000)"
    )
    server.add_argument("--model", metavar="NAME", help="the model's name there (default: the first it serves)")
    server.add_argument(
        "--api-key",
        default=environment_api_key(),
        metavar="KEY",
        help="the server's key (default: PAXSERVE_API_KEY or VLLM_API_KEY)",
    )


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Which requests; shared with `paxserve bench throughput`, where `--seed` is the engine's too."""
    dataset = parser.add_argument_group("data set")
    dataset.add_argument("--dataset", default="random", help='"random" token ids, or a JSONL file (default: random)')
    dataset.add_argument(
        "--num-prompts", type=int, metavar="N", help="requests to send (default: 1000 random ones, or the whole file)"
    )
    dataset.add_argument(
        "--random-input-len", type=int, default=1024, metavar="N", help="prompt tokens (default: 1024)"
    )
    dataset.add_argument("--random-output-len", type=int, default=128, metavar="N", help="output tokens (default: 128)")
    dataset.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by this share (default: 0)"
    )
    dataset.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share (default: 0)"
    )
    dataset.add_argument(
        "--random-vocab-size", type=int, default=10_000, metavar="N", help="ids are below this (default: 10000)"
    )
    dataset.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="output tokens of JSONL rows without max_tokens"
    )


def run(arguments: argparse.Namespace) -> int:
    """Send the load and report; the status is 1 if any request failed."""
    from paxserve.bench import client, datasets, load, report  # late, as httpx and numpy load slowly
    from paxserve.client import server_root

    requests = read_dataset(arguments)
    if arguments.endpoint.endswith("/chat/completions") and any(isinstance(r.prompt, list) for r in requests):
        raise ConfigError(
            "/v1/chat/completions takes text, and these prompts are token ids: give a JSONL file with text."
        )
    root = server_root(arguments.base_url)
    target = client.Target(
        root=root,
        model=arguments.model or load.served_model(root, arguments.api_key),
        endpoint=arguments.endpoint,
        ignore_eos=arguments.ignore_eos,
    )
    shape = load.Load(
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        seed=arguments.seed,
    )
    asyncio.run(load.check_server(target, datasets.reversed_prompt(requests[0]), arguments.api_key))
    records, duration = asyncio.run(load.run_load(target, requests, shape, arguments.api_key))
    summary = report.summarise(records, duration)
    print(report.as_text(summary))
    for failure in report.failures(records):
        print(f"failed: {failure}", file=sys.stderr)
    _keep(arguments, _settings(arguments, target.model) | summary | report.per_request(records))
    return 0 if summary["failed"] == 0 else 1


def read_dataset(arguments: argparse.Namespace) -> list[Any]:
    """The requests that the arguments of `add_dataset_arguments` ask for, or a `ConfigError`."""
    from paxserve.bench import datasets

    num = arguments.num_prompts
    if num is not None and num < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {num}.")
    if arguments.dataset == "random":
        lengths = datasets.RandomLengths(
            input_len=arguments.random_input_len,
            output_len=arguments.random_output_len,
            range_ratio=arguments.random_range_ratio,
            prefix_len=arguments.random_prefix_len,
            vocab_size=arguments.random_vocab_size,
        )
        return datasets.random_requests(num or 1000, lengths, getattr(arguments, "seed", 0))
    rows = datasets.read_jsonl(Path(arguments.dataset), arguments.output_len)
    if num is not None and num > len(rows):
        raise ConfigError(f"{arguments.dataset} has {len(rows)} requests, fewer than the {num} of --num-prompts.")
    return rows[:num]


def _settings(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    return {
        "base_url": arguments.base_url,
        "model": model,
        "dataset": arguments.dataset,
        "request_rate": "inf" if arguments.request_rate == float("inf") else arguments.request_rate,
        "max_concurrency": arguments.max_concurrency,
    }


def _keep(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    from paxserve.bench import plot, report

    if arguments.save_result:
        report.save(arguments.save_result, result)
    if arguments.plot:
        plot.draw(result, arguments.plot)
