"""Settings of the engine that may change how fast tokens come and never which: combinations in which every two meet."""

import dataclasses
import itertools
from typing import Any

from models.layer_groups import pages_for
from paxserve.beam_search_params import BeamSearchParams
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.engine_core import EngineCore
from paxserve.engine.host_tier import HostTier
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.model_runner import Launched
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import ScheduledStep
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams
from tests.engine_driver import request, run

SETTINGS: dict[str, tuple[Any, ...]] = {
    "enable_prefix_caching": (True, False),
    "kv_offloading": (None, "host", "disk"),
    "few_pages": (False, True),
    "async_scheduling": (True, False),
    "enable_chunked_prefill": (True, False),
    "max_num_batched_tokens": (32, 12),
    "max_num_seqs": (6, 3),
    "partial_prefills": ((1, 0), (3, 9)),
    "short_prompt_share": (0.25, 0.0),
    "num_scheduler_steps": (1, 4),
    "priorities": (False, True),
    "beside": ("nothing", "sampled", "choices", "beams"),
}
"""Each setting and its values, the default first. A new flag is one more line here, and one where it is read below."""

CONFLICTS = (
    {"enable_prefix_caching": False, "kv_offloading": "host"},
    {"enable_prefix_caching": False, "kv_offloading": "disk"},
    {"enable_chunked_prefill": False, "partial_prefills": (3, 9)},
)
"""What the configuration refuses."""

Row = dict[str, Any]


def is_allowed(row: Row) -> bool:
    """Whether the configuration takes these settings together."""
    return not any(conflict.items() <= row.items() for conflict in CONFLICTS)


def pairwise(settings: dict[str, tuple[Any, ...]]) -> list[Row]:
    """Rows in which every two values that may meet do so, found greedily: far fewer than the product."""
    missing = {
        frozenset(((one, a), (two, b)))
        for one, two in itertools.combinations(settings, 2)
        for a, b in itertools.product(settings[one], settings[two])
        if is_allowed({one: a, two: b})
    }
    rows = [{name: values[0] for name, values in settings.items()}]
    missing -= _pairs(rows[0])
    while missing:
        row: Row = dict(min(missing, key=repr))
        for name, values in settings.items():
            if name not in row:
                choices = [value for value in values if is_allowed(row | {name: value})]
                row[name] = max(choices, key=lambda value: len(missing & _pairs(row | {name: value})))
        missing -= _pairs(row)
        rows.append({name: row[name] for name in settings})
    return rows


def every(settings: dict[str, tuple[Any, ...]]) -> list[Row]:
    """Each setting alone at each of its values, all others at their defaults."""
    default = {name: values[0] for name, values in settings.items()}
    return [default | {name: value} for name, values in settings.items() for value in values[1:]]


def _pairs(row: Row) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def neighbours(kind: str, prompt: list[int]) -> list[EngineRequest]:
    """What runs beside the greedy requests whose tokens are known."""
    if kind == "sampled":
        return [request(f"beside {i}", prompt[i:], temperature=0.9, seed=i, max_tokens=9 + i) for i in range(3)]
    if kind == "choices":
        return [request("beside", prompt, temperature=0.9, seed=3, n=3, max_tokens=10)]
    if kind == "beams":
        params = SamplingParams(n=3, max_tokens=10, ignore_eos=True)
        beams = BeamSearchParams(beam_width=3, max_tokens=10)
        return [
            EngineRequest(
                request_id="beside", prompt_token_ids=prompt, params=params, arrival_time=0.0, beam_search=beams
            )
        ]
    return []


SLOTS_BESIDE_DISK = 2
"""Pages of each group that host memory has room for where there is a disk: the rest comes back from there."""


class FeatureBench:
    """An engine whose settings can be changed without compiling anew; it has the most of all that they ask for."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.pool = core.scheduler.pool
        self.num_from_disk = 0
        """Pages that steps have brought back from disk."""
        launch = core.runner.launch

        def counted(step: ScheduledStep | DecodeStep) -> Launched:
            self.num_from_disk += len(step.page_fills)
            return launch(step)

        core.runner.launch = counted

    def apply(self, row: Row) -> None:
        """Give the engine these settings. Its programs stay: none of the settings changes what a step computes."""
        core, old = self.core, self.pool
        config = core.config
        most_partial, threshold = row["partial_prefills"]
        settings = dataclasses.replace(
            config.scheduler,
            max_num_seqs=row["max_num_seqs"],
            max_num_batched_tokens=row["max_num_batched_tokens"],
            enable_chunked_prefill=row["enable_chunked_prefill"],
            async_scheduling=row["async_scheduling"],
            scheduling_policy="priority" if row["priorities"] else "fcfs",
            max_num_partial_prefills=most_partial,
            long_prefill_token_threshold=threshold,
            short_prompt_share=row["short_prompt_share"],
            num_scheduler_steps=row["num_scheduler_steps"],
        )
        core.config = dataclasses.replace(config, scheduler=settings)
        longest = core.model_info.max_model_len
        num_pages = core.model_info.num_pages
        if row["few_pages"]:
            # As many as the longest sequence takes, and a few more.
            needed = pages_for(old.reaches, longest, old.page_size, row["max_num_batched_tokens"])
            num_pages = min(num_pages, needed + 3 * len(old.reaches))
        disk = old.disk if row["kv_offloading"] == "disk" else None
        num_slots = SLOTS_BESIDE_DISK * len(old.reaches) if disk is not None else old.num_host_slots
        host = HostTier(num_slots) if row["kv_offloading"] else None
        pool = PagePool(
            num_pages, old.page_size, enable_prefix_caching=row["enable_prefix_caching"], host=host, disk=disk,
            reaches=old.reaches,
        )  # fmt: skip
        core.runner._host_pages._disk = disk
        core.scheduler = Scheduler.for_config(settings, pool, longest)
        core._depth = 2 if row["async_scheduling"] else 1

    def check_row(self, row: Row, prompts: list[list[int]], expected: list[list[int]]) -> None:
        """All prompts get the tokens expected of them, again and again.

        First nothing is cached, then what that has left; then, if pages are kept on disk, nothing but those.
        """
        if self.pool.disk is not None:
            self.core.runner._host_pages.settle()
            self.pool.disk.clear()
        self.apply(row)
        lives = [self._live(row, prompts, expected) for _ in range(2)]
        if row["kv_offloading"] == "disk":
            self._leave_on_disk(prompts[0])
            self.apply(row)
            lives.append(self._live(row, prompts, expected))
        assert all(beside == lives[0] for beside in lives), row

    def _leave_on_disk(self, prompt: list[int]) -> None:
        """Have all cached pages go where the ones that are evicted go, ahead of the step of somebody else."""
        pool, disk = self.core.scheduler.pool, self.pool.disk
        assert disk is not None
        pool.release(pool.allocate(pool.num_free))
        run(self.core, [request("another", prompt[::-1], max_tokens=1)])
        self.core.runner._host_pages.settle()
        disk.flush()

    def _live(self, row: Row, prompts: list[list[int]], expected: list[list[int]]) -> dict[tuple[str, int], list[int]]:
        """Check the tokens of the prompts; returns those of what runs beside them."""
        requests = []
        for i, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            greedy = request(str(i), prompt, max_tokens=len(tokens))
            greedy.priority = (i % 3 - 1) if row["priorities"] else 0
            requests.append(greedy)
        # In the middle, so that there is something before and after it.
        requests[1:1] = neighbours(row["beside"], prompts[0])
        results = run(self.core, requests)
        for i, tokens in enumerate(expected):
            assert results[str(i), 0].token_ids == tokens, f"prompt {i}, {row}"
        return {key: result.token_ids for key, result in results.items() if key[0].startswith("beside")}
