"""Run one of the fixed workloads W1 to W4 against a server."""

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from paxserve.commands.bench_serve import add_server_arguments
from paxserve.errors import ConfigError

USAGE = "W1|W2|W3|W4 [--base-url URL] [flags]"
DESCRIPTION = """\
Run one of the fixed workloads against an OpenAI-compatible server and print its figures as JSON.

    W1  64 requests at once, prompts of 32 to 512 tokens, 64 tokens out each
    W2  one request, 128 tokens in, 128 out
    W3  the requests of W1, arriving at --request-rate a second
    W4  32 requests that share a prefix of 768 tokens, 32 tokens of their own, 16 out

Prompts are token ids of SmolLM2-135M-Instruct; outputs are greedy and ignore the end token. Every repeat has
another first token, so that no prefix cache knows the prompts."""

TOKENS_TO_START_WITH = (1_000, 40_000)
"""Range of ids for the first token: ordinary words in SmolLM2's vocabulary of 49,152."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload, the server, and how often."""
    parser.add_argument("workload", choices=("W1", "W2", "W3", "W4"), metavar="W1|W2|W3|W4", help="see above")
    add_server_arguments(parser)
    run_group = parser.add_argument_group("run")
    run_group.add_argument(
        "--request-rate", type=float, default=2.0, metavar="X", help="arrivals a second in W3 (default: 2)"
    )
    run_group.add_argument("--repeats", type=int, default=1, metavar="N", help="measure this many times (default: 1)")
    run_group.add_argument(
        "--prime", action="store_true", help="send the first request once before measuring: W4's prefix is then cached"
    )
    run_group.add_argument(
        "--seed", type=int, metavar="N", help="seed of the first tokens (default: new ones each time)"
    )
    run_group.add_argument(
        "--server-pid", type=int, metavar="PID", help="report the peak memory of this process and its children too"
    )
    run_group.add_argument("--file", type=Path, help="another workload file than paxserve's own")
    run_group.add_argument(
        "--save-result", type=Path, metavar="FILE", help="write all figures, each request's too, as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print one JSON object a repeat; the status is 1 if any request failed."""
    from paxserve.bench import client, datasets, load, process_memory, report  # late, as httpx and numpy load slowly
    from paxserve.client import server_root

    if arguments.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {arguments.repeats}.")
    requests = datasets.read_workload(arguments.workload, arguments.request_rate, arguments.file)
    root = server_root(arguments.base_url)
    model = arguments.model or load.served_model(root, arguments.api_key)
    target = client.Target(root=root, model=model, ignore_eos=True)
    tokens = random.Random(arguments.seed).sample(range(*TOKENS_TO_START_WITH), arguments.repeats + 1)
    warm_up = datasets.with_first_token(requests[:1], tokens.pop())
    asyncio.run(load.check_server(target, warm_up[0], arguments.api_key))
    results, num_failed = [], 0
    for token in tokens:
        fresh = datasets.with_first_token(requests, token)
        if arguments.prime:
            asyncio.run(load.check_server(target, fresh[0], arguments.api_key))
        records, duration = asyncio.run(load.run_load(target, fresh, load.Load(), arguments.api_key))
        summary = report.summarise(records, duration)
        num_failed += summary["failed"]
        shown = figures(arguments, summary)
        if arguments.server_pid is not None:
            shown["peak_memory_gib"] = round(process_memory.peak_bytes(arguments.server_pid) / 2**30, 3)
        print(json.dumps(shown), flush=True)
        for failure in report.failures(records):
            print(f"failed: {failure}", file=sys.stderr)
        results.append({"workload": arguments.workload, "model": model} | summary | report.per_request(records))
    if arguments.save_result:
        report.save(arguments.save_result, {"runs": results})
    return 0 if num_failed == 0 else 1


def figures(arguments: argparse.Namespace, summary: dict[str, Any]) -> dict[str, Any]:
    """The few figures that workloads are compared by."""
    rate = {"request_rate": arguments.request_rate} if arguments.workload == "W3" else {}
    names = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_tpot_ms")
    return (
        {"workload": arguments.workload, **rate, "primed": arguments.prime}
        | {"completed": summary["completed"], "failed": summary["failed"]}
        | {"duration_s": round(summary["duration"], 3), "output_tokens": summary["total_output_tokens"]}
        | {"output_tokens_per_s": round(summary["output_throughput"], 2)}
        | {name: None if summary[name] is None else round(summary[name], 1) for name in names}
    )
