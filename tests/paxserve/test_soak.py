"""A server that is asked for more than it can do, with every feature on: nothing leaks or is lost, all counts agree.

SOAK_SECONDS says how long (60 by default); what was seen is printed as JSON.
"""

import asyncio
import json
import os
import re
import signal
import statistics
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from paxserve.bench.process_memory import status_bytes
from tests.paxserve.running_server import RunningServer
from tests.paxserve.soak_load import Load
from tests.small_tokenizers import CHATML, byte_level_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    # Requests that the client gives up while they are being connected leave sockets that httpx does not close.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
OVERLOAD = 2.0
"""Arrivals over what the server can answer."""
WAVE_SECONDS = 20.0
LULL = 0.2
"""Share of the time, and of the capacity, in which the queue empties: only then are there several steps a program."""
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,  # a quarter of what sixteen sequences could use
    "block_size": 16,
    "scheduling_policy": "priority",
    "max_num_partial_prefills": 2,
    "long_prefill_token_threshold": 48,
    "kv_offloading_size": 0.0005,
    "kv_offloading_disk_size": 0.002,  # four times the host's
    "num_scheduler_steps": 4,
    "compile_sizes": [16],
}
SERVER = {
    "max_num_queued_reqs": 24, "request_timeout": 3.0, "disable_uvicorn_access_log": True,
    "enable_prompt_tokens_details": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny Llama with a tokenizer."""
    golden = Path(__file__).parents[1] / "goldens" / "llama"
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(golden / name)
    byte_level_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


class Watch:
    """What the server's processes take, looked at every few seconds."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        core, *fronts = server.core_pids()
        self.pids = {"front": server.process.pid, "core": core}
        self.pids |= {f"front {number}": pid for number, pid in enumerate(fronts, start=1)}
        self.samples: list[dict[str, int]] = []
        self._log = threading.Thread(target=self._read_log, daemon=True)
        self._log.start()

    def _read_log(self) -> None:
        assert self.server.process.stdout is not None
        for line in self.server.process.stdout:
            self.server.log += line

    async def sample(self) -> dict[str, int]:
        """Memory in bytes, open files and threads of all processes, and the first one's tasks."""
        found = {}
        for name, pid in self.pids.items():
            found[f"{name} bytes"] = status_bytes(pid, "VmRSS")
            found[f"{name} files"] = len(os.listdir(f"/proc/{pid}/fd"))
            found[f"{name} threads"] = len(os.listdir(f"/proc/{pid}/task"))
        self.server.process.send_signal(signal.SIGUSR2)
        await asyncio.sleep(0.2)
        found["tasks"] = int(re.findall(r"tasks: (\d+)", self.server.log)[-1])
        return found

    async def watch(self, every: float) -> None:
        """Sample until cancelled."""
        while True:
            self.samples.append(await self.sample())
            await asyncio.sleep(every)

    def end(self) -> None:
        """Read what the server has said to its end."""
        self._log.join(30)

    def core_counts(self) -> dict[str, int]:
        """What the core has counted, as it last said."""
        return json.loads(re.findall(r"core counts: (.*)", self.server.log)[-1])

    def growth(self, name: str) -> float:
        """The last quarter over the second one, as a share: the first is the warm-up."""
        values = [sample[name] for sample in self.samples]
        quarter = len(values) // 4
        return statistics.median(values[-quarter:]) / statistics.median(values[quarter : 2 * quarter]) - 1


def metric(text: str, name: str, **labels: str) -> int:
    """The sum of a metric's values with these labels."""
    found = re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", text, re.MULTILINE)
    assert found, name
    parts = [f'{label}="{value}"' for label, value in labels.items()]
    return round(sum(float(value) for names, value in found if all(part in names for part in parts)))


async def idle_metrics(http: httpx.AsyncClient) -> str:
    """The metrics once nothing runs any more."""
    async with asyncio.timeout(30):
        while True:
            text = (await http.get("/metrics")).text
            busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "paxserve:pages_in_use")
            if not any(metric(text, name) for name in busy):
                return text
            await asyncio.sleep(0.2)


async def soak(url: str, watch: Watch) -> tuple[Load, str, list[dict[str, int]], dict[str, Any]]:
    # An idle connection is given up well before the server closes it, which would break a request on its way.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=1)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        load = Load(http, seed=5)
        await load.learn_answers()
        capacity = await load.measure_capacity(min(10, SECONDS / 4))
    await asyncio.sleep(6)  # longer than idle connections are kept
    before = await watch.sample()
    watching = asyncio.create_task(watch.watch(max(1, SECONDS / 100)))
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as load.http:
        for _ in range(max(1, round(SECONDS / WAVE_SECONDS))):
            await load.run((1 - LULL) * WAVE_SECONDS, OVERLOAD * capacity)
            await load.run(LULL * WAVE_SECONDS, LULL * capacity)
        await load.wait()
        watching.cancel()
        text = await idle_metrics(load.http)
    await asyncio.sleep(6)
    return load, text, [before, await watch.sample()], {"capacity": capacity}


def test_overload(folder, tmp_path_factory):
    core, pages = "tests.paxserve.checked_core:CheckedCore", tmp_path_factory.mktemp("pages")
    engine = ENGINE | {"kv_offloading_disk_path": str(pages)}
    with RunningServer(folder, core=core, engine=engine, **SERVER) as server:
        url = server.wait_ready()
        watch = Watch(server)
        load, text, (before, after), seen = asyncio.run(soak(url, watch))
        server.process.terminate()
        assert server.process.wait(30) == 0
        watch.end()
    check_folder(pages)
    tally = load.tally
    ended = {
        reason: metric(text, "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort")
    }
    seen |= {
        "seconds": SECONDS, "requests": dict(tally.outcomes), "choices": dict(tally.choices),
        "features": dict(tally.features), "server": ended, "core": watch.core_counts(),
        "before": before, "after": after,
        "growth": {name: round(watch.growth(f"{name} bytes"), 4) for name in watch.pids},
        "metrics": {name: metric(text, f"vllm:{name}_total") for name in (
            "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits",
            "generation_tokens", "admission_rejections",
        )},
    }  # fmt: skip
    print(json.dumps(seen, indent=1))
    check(load, text, ended, before, after, watch)


def check_folder(pages: Path) -> None:
    """It is full, and no fuller than allowed; nothing in it is half written."""
    num_bytes = sum(file.stat().st_size for file in pages.glob("*/*.page"))
    most = ENGINE["kv_offloading_disk_size"] * 2**30
    assert 0.9 * most < num_bytes <= most
    assert not list(pages.glob("*/*.unfinished"))


def check(
    load: Load, text: str, ended: dict[str, int], before: dict[str, int], after: dict[str, int], watch: Watch
) -> None:
    tally = load.tally
    assert not tally.faults, "\n".join([str(len(tally.faults)), *tally.faults[:8]])
    # 1. Every request has ended in one way, and there was too much of them.
    outcomes = tally.outcomes
    assert outcomes["sent"] == outcomes["answered"] + outcomes["refused"] + outcomes["left"]
    assert outcomes["refused"] > 0
    assert metric(text, "vllm:num_preemptions_total") > 0
    assert metric(text, "vllm:external_prefix_cache_hits_total") > 0
    counts = watch.core_counts()
    assert min(counts[name] for name in ("several steps", "from host", "from disk")) > 0, counts
    assert counts["damaged"] == 0
    # 2. The server counted what the client did; of requests that were left, both may think differently.
    left = tally.choices_left
    for reason, count in ended.items():
        assert tally.choices[reason] <= count <= tally.choices[reason] + left, reason
    assert sum(ended.values()) <= sum(tally.choices.values()) + left
    rejected = metric(text, "vllm:admission_rejections_total")
    assert outcomes["refused"] <= rejected <= outcomes["refused"] + outcomes["left"]
    assert tally.tokens <= metric(text, "vllm:generation_tokens_total")
    assert metric(text, "paxserve:recompilations_total") == 0
    # 3. Nothing is left behind.
    assert after["tasks"] <= before["tasks"] + 1
    for name in watch.pids:
        assert after[f"{name} files"] <= before[f"{name} files"] + 2
        assert after[f"{name} threads"] <= before[f"{name} threads"] + 2
        assert watch.growth(f"{name} bytes") < 0.05
