from collections import deque

import numpy as np
import pytest

from paxserve.engine import wire
from paxserve.engine.batch import SlotTable, pack
from paxserve.engine.buckets import fitting, plain_layouts
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult, ScheduledStep
from paxserve.messages import DecodedTokens, EngineOutput, EngineRequest, EngineStats, StepOutputs
from paxserve.sampling_params import SamplingParams

EOS, PAGE_SIZE, NUM_SLOTS = 2, 4, 8


class PlainScheduler(Scheduler):
    """Plans every step from the beginning."""

    def _decode_on(self):
        return None


class Loop:
    """The engine's loop; the token at a request's position p is 10 + (p + its number) % 7, or what `ends` says."""

    def __init__(self, scheduler_class=Scheduler, *, depth=2, num_pages=200, ahead=1):
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.scheduler = scheduler_class(
            self.pool, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100, num_scheduler_steps=ahead
        )
        self.depth = depth
        self.ends = {}
        self.launched = deque()
        self.heard, self.plans, self.kinds = {}, [], []

    def add(self, number, prompt_len, **params):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "eos_token_ids": [EOS], **params})
        prompt = [100 + number] * prompt_len
        source = EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params, arrival_time=0.0)
        self.scheduler.add(expand_choices(source, list(range(params.n)), number))

    def step(self):
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            rows = step.rows
            plan = [(r.request.request_id, r.start, r.num_tokens, r.position, [*r.request.tables[0]]) for r in rows]
            self.plans.append(sorted(plan))
            self.kinds.append(type(step))
            tokens = [self.token(row.request.request_id, row.position) for row in rows]
            results = np.array([tokens]) if isinstance(step, DecodeStep) else [RowResult(token) for token in tokens]
            self.launched.append((step, results))
        if self.launched and (step is None or len(self.launched) >= self.depth):
            outputs = self.scheduler.update(*self.launched.popleft())
            self.scheduler.check_integrity()
            for output in outputs:
                self.heard.setdefault((output.request_id, output.index), []).append(
                    (output.new_token_ids, output.finish_reason)
                )
            return outputs
        return []

    def token(self, request_id, position):
        return self.ends.get((request_id, position), 10 + (position + int(request_id)) % 7)

    def run(self):
        while self.scheduler.has_unfinished() or self.launched:
            self.step()
        assert self.pool.num_in_use == 0


def scenario(loop):
    for number in range(3):
        loop.add(number, 3 + 2 * number)
    loop.ends = {("1", 11): EOS}
    for _ in range(8):
        loop.step()
    loop.add(3, 9, max_tokens=30)
    for _ in range(5):
        loop.step()
    loop.scheduler.abort("0")
    loop.add(4, 2, max_tokens=6)
    loop.run()
    return loop


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_plans_pages_and_tokens_are_those_of_steps_planned_from_the_beginning(depth):
    fast, plain = scenario(Loop(depth=depth)), scenario(Loop(PlainScheduler, depth=depth))
    assert fast.plans == plain.plans
    assert fast.heard == plain.heard
    assert fast.kinds.count(DecodeStep) > len(fast.kinds) // 2
    assert plain.kinds.count(DecodeStep) == 0
    caches = [loop.pool.prefix_cache for loop in (fast, plain)]
    assert caches[0]._hash_of == caches[1]._hash_of
    assert fast.scheduler.stats() == plain.scheduler.stats()


def test_its_buffer_is_that_of_the_same_rows_spelled_out():
    loop = Loop(depth=3)  # so that the step before has not been read when this one is packed below
    for number in range(3):
        loop.add(number, 3 + 2 * number)
    slots, spelled = SlotTable(NUM_SLOTS, 25), SlotTable(NUM_SLOTS, 25)
    layouts, num_decodes = plain_layouts(64, 8, PAGE_SIZE), 0
    for _ in range(12):
        loop.step()
        step, _ = loop.launched[-1]
        rows = ScheduledStep(step.rows, [])
        layout = fitting(layouts, step.num_tokens, step.num_rows)[0]
        changes, expected = slots.changes(step.changed), spelled.changes(rows.changed)
        assert changes == expected
        size = NUM_SLOTS * slots.width
        np.testing.assert_array_equal(pack(step, layout, *changes[:2], size), pack(rows, layout, *expected[:2], size))
        num_decodes += isinstance(step, DecodeStep)
    assert num_decodes >= 8


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"presence_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
        {"prompt_logprobs": 0},
        {"bad_words": ["a b"], "bad_words_token_ids": [[5, 6]]},
    ],
)
def test_requests_that_want_more_are_planned_row_by_row(params):
    loop = Loop()
    words = params.pop("bad_words_token_ids", None)
    loop.add(0, 5, **params)
    if words:
        (request,) = loop.scheduler.waiting
        request.params.bad_words_token_ids, request.needs_host_tokens = words, True
    loop.add(1, 5)
    loop.run()
    together = [plan for plan in loop.plans if len(plan) == 2]
    assert together
    assert DecodeStep not in loop.kinds[: len(together)]


def test_min_tokens_hold_it_back_only_until_they_are_there():
    loop = Loop()
    loop.add(0, 5, min_tokens=6)
    loop.run()
    kinds = [kind is DecodeStep for kind in loop.kinds]
    assert kinds == sorted(kinds)
    assert kinds.index(True) == 6


def test_when_pages_run_out_a_request_is_preempted_as_ever():
    fast, plain = Loop(num_pages=9), Loop(PlainScheduler, num_pages=9)
    for loop in (fast, plain):
        for number in range(3):
            loop.add(number, 5)
        loop.run()
    assert fast.scheduler.stats().num_preemptions == plain.scheduler.stats().num_preemptions > 0
    assert fast.heard == plain.heard


def test_programs_of_several_steps_shrink_where_pages_are_short_and_nobody_is_preempted():
    loop = Loop(num_pages=8, ahead=8)
    for number in range(2):
        loop.add(number, 3, max_tokens=13)
    counts = []
    while (step := loop.scheduler.schedule()) is not None:
        loop.scheduler.check_integrity()
        tokens = np.full((step.count, step.num_rows), 7)
        results = tokens if isinstance(step, DecodeStep) else [RowResult(7) for _ in step.rows]
        loop.scheduler.update(step, results)
        loop.scheduler.check_integrity()
        counts.append(step.count)
    # 15 tokens each are computed, 4 pages each: just enough. The prompts' step gives the first token, 12 are left.
    assert counts == [1, 8, 4]
    loop = Loop(num_pages=5, ahead=8)
    loop.add(0, 3, max_tokens=30)
    loop.step()
    assert loop.scheduler.schedule().count == 8
    assert loop.scheduler.schedule().count == 8
    assert loop.scheduler.schedule().count == 1
    assert loop.scheduler.stats().num_preemptions == 0


def test_whoever_waits_is_kept_waiting_for_one_token_at_a_time():
    loop = Loop(ahead=4)
    for number in range(9):  # one more than there are slots
        loop.add(number, 3, max_tokens=20)
    for _ in range(3):
        loop.step()
    assert loop.scheduler.schedule().count == 1
    loop.scheduler.abort("8")
    assert loop.scheduler.schedule().count == 4


def test_a_step_tells_all_tokens_in_one_message():
    loop = Loop()
    loop.add(0, 4)
    loop.add(1, 4, n=2, temperature=1.0)
    for _ in range(6):
        outputs = loop.step()
    assert isinstance(outputs, DecodedTokens)
    step = StepOutputs([EngineOutput(request_id="gone", new_token_ids=[], finish_reason="abort")])
    step.add(outputs)
    message = wire.decode_from_core(wire.encode(wire.Outputs.of(step, EngineStats(num_steps=6))))
    assert message.outputs == step.listed
    assert list(message.decoded) == list(outputs)
    keys = [(output.request_id, output.index) for output in step]
    assert keys == [("gone", 0), ("0", 0), ("1", 0), ("1", 1)]
    assert len(step) == 4
