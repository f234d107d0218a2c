"""What a step costs the host beside the device: planning, packing, taking in results, and the message to the front."""

import time
from collections import deque
from typing import Any

import numpy as np

from paxserve.engine import wire
from paxserve.engine.batch import SlotTable, pack
from paxserve.engine.buckets import fitting, plain_layouts
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import Request, expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult, ScheduledStep
from paxserve.messages import EngineRequest, StepOutputs
from paxserve.sampling_params import SamplingParams

PAGE_SIZE = 16
WARM_UP_STEPS = 20
OUTPUT_TOKEN, EOS = 7, 0
PHASES = ("schedule", "pack", "update", "message")


def measure_host_cost(
    num_rows: int, num_steps: int, prompt_len: int = 64, *, is_changing: bool = False
) -> dict[str, Any]:
    """Milliseconds of one core that each phase of a decode step of `num_rows` rows takes, median of `num_steps`.

    Either no row joins or leaves, or one does both in every step. The pipeline is as deep as the engine's; nothing runs
    on a device.
    """
    max_len = prompt_len + WARM_UP_STEPS + num_steps + 8
    scheduler = _filled_scheduler(num_rows, prompt_len, max_len)
    max_pages = -(-max_len // PAGE_SIZE)
    slots = SlotTable(num_rows, max_pages)
    layouts = plain_layouts(max(num_rows, 2048), num_rows, PAGE_SIZE)
    launched: deque[ScheduledStep | DecodeStep] = deque()
    seconds: list[list[float]] = []
    while len(seconds) < num_steps + WARM_UP_STEPS:
        begin = time.perf_counter()
        if is_changing and len(scheduler.running) == num_rows:
            _exchange_one(scheduler)
        step = scheduler.schedule()
        assert step is not None, "a request has come to its end"
        planned = time.perf_counter()
        indices, values, _ = slots.changes(step.changed)
        layout = fitting(layouts, step.num_tokens, step.num_rows)[0]
        count = min(len(indices), layout.num_deltas)  # the rest goes ahead of the step, in another buffer
        pack(step, layout, indices[:count], values[:count], num_rows * slots.width)
        packed = time.perf_counter()
        launched.append(step)
        if len(launched) < 2:
            continue
        oldest = launched.popleft()
        is_plain = isinstance(oldest, DecodeStep)
        tokens = np.full((1, oldest.num_rows), OUTPUT_TOKEN)
        results = tokens if is_plain else [RowResult(token) for token in tokens[0].tolist()]
        ready = time.perf_counter()
        outputs = StepOutputs([])
        outputs.add(scheduler.update(oldest, results))
        updated = time.perf_counter()
        wire.encode(wire.Outputs.of(outputs, scheduler.stats()))
        if step.num_rows == num_rows and step.num_tokens == num_rows:
            done = time.perf_counter()
            seconds.append([planned - begin, packed - planned, updated - ready, done - updated])
    medians = 1000 * np.median(np.array(seconds[WARM_UP_STEPS:]), axis=0)
    phases = {f"{name}_ms": round(float(value), 4) for name, value in zip(PHASES, medians, strict=True)}
    return {
        "rows": num_rows,
        "changing": is_changing,
        **phases,
        "schedule_pack_update_ms": round(float(medians[:3].sum()), 4),
    }


def _filled_scheduler(num_rows: int, prompt_len: int, max_len: int) -> Scheduler:
    """A scheduler with so many requests that wait to run; their lengths differ, as real ones' do."""
    pool = PagePool(num_rows * -(-(max_len + PAGE_SIZE) // PAGE_SIZE), PAGE_SIZE)
    scheduler = Scheduler(
        pool, max_num_seqs=num_rows, max_num_batched_tokens=max(num_rows, 2048), max_model_len=2 * max_len
    )
    for number in range(num_rows):
        length = prompt_len - number % min(PAGE_SIZE, prompt_len)
        scheduler.add(_request(number, length, max_len))
    return scheduler


def _request(number: int, length: int, max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, eos_token_ids=[EOS])
    source = EngineRequest(
        request_id=f"cmpl-{number:032x}-0", prompt_token_ids=[number + 1] * length, params=params, arrival_time=0.0
    )
    return expand_choices(source, [number], number)


def _exchange_one(scheduler: Scheduler) -> None:
    """Have the longest running request leave and another come, of one token, so that the step stays one of decodes."""
    oldest = scheduler.running[0]
    scheduler.abort(oldest.request_id)
    scheduler.add(_request(oldest.arrival + scheduler.max_num_seqs, 1, oldest.most_tokens))
