"""What HTTP adds to the engine's own time: the same requests offline and through a server, taking turns."""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from paxserve.bench.client import Target
from paxserve.bench.datasets import BenchRequest, with_first_token
from paxserve.bench.load import Load, run_load
from paxserve.bench.offline import measure_throughput
from paxserve.bench.process_memory import descendants
from paxserve.bench.startup import first_model, free_port, running, wait_healthy
from paxserve.client import client_options
from paxserve.errors import ConfigError
from paxserve.llm import LLM

FIRST_TOKEN = 1_000
"""First token of the first turn's prompts; each turn has another, so that no prefix cache knows them."""


def measure_overhead(
    model: str, serve_arguments: Sequence[str], llm: LLM, requests: list[BenchRequest], rounds: int, timeout: float
) -> dict[str, Any]:
    """Seconds of wall clock and of processors for the requests, offline and served with a stream each.

    Rounds take turns in who goes first; what counts is the median of the rounds' ratios. Processor times bear other
    work on the machine better than the clock does.
    """
    root = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "paxserve", "serve", model, *serve_arguments, "--disable-uvicorn-access-log"]
    figures: list[dict[str, float]] = []
    with ExitStack() as stack:
        process = stack.enter_context(running([*command, "--host", "127.0.0.1", "--port", root.rpartition(":")[2]]))
        client = stack.enter_context(httpx.Client(**client_options(root, None)))
        wait_healthy(process, client, f"{root}/health", time.perf_counter() + timeout)
        target = Target(root=root, model=first_model(client, root), ignore_eos=True)
        for number in tqdm(range(-1, rounds), desc="Rounds, the first to warm up", disable=not sys.stderr.isatty()):
            fresh = [with_first_token(requests, FIRST_TOKEN + 2 * (number + 1) + turn) for turn in (0, 1)]
            turns = [partial(_offline, llm, fresh[0]), partial(_served, target, fresh[1], process.pid)]
            results = [turn() for turn in (turns if number % 2 else turns[::-1])]
            if number >= 0:
                figures.append(results[0] | results[1])
    for row in figures:
        row["overhead"] = row["served_seconds"] / row["offline_seconds"] - 1
    return {"rounds": figures} | {
        f"median_{name}": statistics.median(row[name] for row in figures) for name in figures[0]
    }


def _offline(llm: LLM, requests: list[BenchRequest]) -> dict[str, float]:
    begin = time.process_time()
    seconds = measure_throughput(llm, requests)["elapsed_time"]
    return {"offline_seconds": seconds, "offline_cpu_seconds": time.process_time() - begin}


def _served(target: Target, requests: list[BenchRequest], front: int) -> dict[str, float]:
    core = [pid for pid in descendants(front) if pid != front]
    before, begin = (cpu_seconds([front]), cpu_seconds(core)), time.process_time()
    records, seconds = asyncio.run(run_load(target, requests, Load()))
    if failed := [record.error for record in records if not record.is_success]:
        raise ConfigError(f"{len(failed)} requests failed: {failed[0]}")
    return {
        "served_seconds": seconds,
        "front_cpu_seconds": cpu_seconds([front]) - before[0],
        "core_cpu_seconds": cpu_seconds(core) - before[1],
        "client_cpu_seconds": time.process_time() - begin,
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time that these processes have taken, from Linux's /proc."""
    # The name in the second field may have spaces; user and system time are the 14th and the 15th.
    rows = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(row[11]) + int(row[12]) for row in rows) / os.sysconf("SC_CLK_TCK")
