"""What a step costs the host beside the device: planning, packing, taking in results, and the message to the front."""

import time
from collections import deque
from typing import Any

import numpy as np

from paxserve.engine import wire
from paxserve.engine.batch import SlotTable, pack
from paxserve.engine.buckets import fitting, plain_layouts
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult, ScheduledStep
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams

PAGE_SIZE = 16
WARM_UP_STEPS = 20
OUTPUT_TOKEN, EOS = 7, 0
PHASES = ("schedule", "pack", "update", "message")


def measure_host_cost(num_rows: int, num_steps: int, prompt_len: int = 64) -> dict[str, Any]:
    """Milliseconds of one core that each phase of a decode step of `num_rows` rows takes, median of `num_steps`.

    The pipeline is as deep as the engine's; nothing runs on a device.
    """
    max_len = prompt_len + WARM_UP_STEPS + num_steps + 8
    scheduler = _filled_scheduler(num_rows, prompt_len, max_len)
    max_pages = -(-max_len // PAGE_SIZE)
    slots = SlotTable(num_rows, max_pages)
    layouts = plain_layouts(max(num_rows, 2048), num_rows, PAGE_SIZE)
    launched: deque[ScheduledStep] = deque()
    seconds: list[list[float]] = []
    while len(seconds) < num_steps + WARM_UP_STEPS:
        begin = time.perf_counter()
        step = scheduler.schedule()
        assert step is not None, "a request has come to its end"
        planned = time.perf_counter()
        indices, values, _ = slots.changes(step.rows)
        layout = fitting(layouts, step.num_tokens, len(step.rows))[0]
        count = min(len(indices), layout.num_deltas)  # the rest goes ahead of the step, in another buffer
        pack(step, layout, indices[:count], values[:count], num_rows * slots.width)
        packed = time.perf_counter()
        launched.append(step)
        if len(launched) < 2:
            continue
        oldest = launched.popleft()
        results = [RowResult(OUTPUT_TOKEN) for _ in oldest.rows]
        ready = time.perf_counter()
        outputs = scheduler.update(oldest, results)
        updated = time.perf_counter()
        wire.encode(wire.Outputs(outputs, scheduler.stats()))
        if len(step.rows) == num_rows and step.num_tokens == num_rows:
            done = time.perf_counter()
            seconds.append([planned - begin, packed - planned, updated - ready, done - updated])
    medians = 1000 * np.median(np.array(seconds[WARM_UP_STEPS:]), axis=0)
    phases = {f"{name}_ms": round(float(value), 4) for name, value in zip(PHASES, medians, strict=True)}
    return {"rows": num_rows, **phases, "schedule_pack_update_ms": round(float(medians[:3].sum()), 4)}


def _filled_scheduler(num_rows: int, prompt_len: int, max_len: int) -> Scheduler:
    """A scheduler with so many requests that wait to run; their lengths differ, as real ones' do."""
    pool = PagePool(num_rows * -(-(max_len + PAGE_SIZE) // PAGE_SIZE), PAGE_SIZE)
    scheduler = Scheduler(
        pool, max_num_seqs=num_rows, max_num_batched_tokens=max(num_rows, 2048), max_model_len=2 * max_len
    )
    params = SamplingParams(max_tokens=max_len, temperature=0.0, eos_token_ids=[EOS])
    for number in range(num_rows):
        length = prompt_len - number % min(PAGE_SIZE, prompt_len)
        request = EngineRequest(
            request_id=f"cmpl-{number:032x}-0", prompt_token_ids=[number + 1] * length, params=params, arrival_time=0.0
        )
        scheduler.add(expand_choices(request, [number], number))
    return scheduler
