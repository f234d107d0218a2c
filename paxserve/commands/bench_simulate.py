"""Simulate the scheduler on a device that only takes time."""

import argparse
import json
import time
from pathlib import Path

from paxserve.config import SchedulerConfig
from paxserve.errors import ConfigError
from paxserve.flags import add_flags, scheduler_config

USAGE = "[--dataset sharegpt|alpaca|FILE] [--request-rate X] [--compare] [flags]"
DESCRIPTION = """\
Run a trace through the real scheduler and page pool, with step times from a table, and print the figures as JSON.

    paxserve bench simulate --num-prompts 100000 --request-rate 1.2
    paxserve bench simulate --step-times opt-13b-a100 --compare

A trace is a JSONL file of {"arrival": seconds, "prompt_len": N, "output_len": N, "prefix": NAME, "prefix_len": N},
the last two as you like; the named data sets draw log-normal lengths (paxserve/bench/trace.py). --compare searches
the rate that each way of keeping memory sustains at an equal mean latency a token: pages, contiguous memory of the
longest length (Orca-Max) and of the true one (Orca-Oracle), and static batches."""

MAX_MODEL_LEN = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, the device, the scheduler."""
    trace = parser.add_argument_group("trace")
    trace.add_argument(
        "--dataset", default="sharegpt", metavar="NAME|FILE", help="sharegpt (default), alpaca or a JSONL file"
    )
    trace.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="requests to draw (default: 1000)")
    trace.add_argument("--request-rate", type=float, default=1.0, metavar="X", help="arrivals a second (default: 1)")
    trace.add_argument(
        "--num-prefixes", type=int, default=0, metavar="N", help="shared prefixes to draw from (default: none)"
    )
    trace.add_argument("--prefix-len", type=int, default=512, metavar="N", help="their length (default: 512)")
    trace.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random trace (default: 0)")
    device = parser.add_argument_group("device")
    device.add_argument(
        "--step-times", default="smollm2-135m-cpu", metavar="NAME|FILE",
        help="smollm2-135m-cpu (default), opt-13b-a100, or a JSON file like those in paxserve/bench/data",
    )  # fmt: skip
    device.add_argument(
        "--kv-tokens", type=int, metavar="N", help="tokens that the KV pool holds (default: the table's)"
    )
    device.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens that a page holds (default: 16)"
    )
    device.add_argument(
        "--max-model-len", type=int, default=MAX_MODEL_LEN, metavar="N", help=f"default: {MAX_MODEL_LEN}"
    )
    device.add_argument(
        "--host-ms", type=float, default=0.0, metavar="X",
        help="milliseconds that a program costs the host, while others run (default: 0)",
    )  # fmt: skip
    compare = parser.add_argument_group("comparison")
    compare.add_argument("--compare", action="store_true", help="search sustainable rates, see above")
    compare.add_argument(
        "--latency-ms", type=float, metavar="X",
        help="mean milliseconds a token that are acceptable (default: 3 times those of a request alone)",
    )  # fmt: skip
    add_flags(parser, (SchedulerConfig,), skip=("async_scheduling", "scheduling_policy"))


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print one JSON object."""
    from paxserve.bench import memory_schemes, step_times, trace  # late, as numpy loads slowly

    for name in ("num_prompts", "request_rate", "block_size", "max_model_len"):
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"{name} must be greater than 0, got {getattr(arguments, name)}.")
    if arguments.host_ms < 0:
        raise ConfigError(f"host_ms must be at least 0, got {arguments.host_ms}.")
    times = step_times.read_step_times(arguments.step_times)
    config = scheduler_config(arguments, max_num_seqs=256, max_num_batched_tokens=2048)
    setup = memory_schemes.Setup(
        times=times, config=config, kv_tokens=arguments.kv_tokens or times.kv_tokens,
        page_size=arguments.block_size, max_model_len=arguments.max_model_len,
        host_seconds=arguments.host_ms / 1000,
    )  # fmt: skip
    if arguments.dataset in trace.LENGTHS:
        rate = 1.0 if arguments.compare else arguments.request_rate
        requests = trace.draw_trace(trace.LENGTHS[arguments.dataset], arguments.num_prompts, rate, arguments.seed)
    else:
        requests = trace.read_trace(Path(arguments.dataset))
    if arguments.num_prefixes > 0:
        requests = trace.with_prefixes(requests, arguments.num_prefixes, arguments.prefix_len, arguments.seed)
    setup.check(requests)
    begin = time.perf_counter()
    if arguments.compare:
        figures = setup.compare(requests, arguments.latency_ms)
    else:
        figures = setup.simulation("paged").run(requests)
    head = {"step_times": times.description, "kv_tokens": setup.kv_tokens}
    print(json.dumps(head | figures | {"host_seconds": time.perf_counter() - begin}, indent=1))
    return 0
