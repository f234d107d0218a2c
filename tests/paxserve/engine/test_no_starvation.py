"""A long prompt among endless short ones is served in bounded time: simulated, with more work than room for it."""

import itertools
from collections import deque

import pytest

from paxserve.engine.kv_cache import PagePool
from paxserve.engine.prefill_limits import PrefillLimits
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams

BUDGET, LONG, SHORT, OUTPUT = 64, 1200, 30, 6
ARRIVAL_STEP = 40
"""When the long prompt comes; by then a queue has formed."""


class Crowd:
    """A scheduler to which short requests come faster than it can serve them."""

    def __init__(self, *, num_pages: int, every: int, priority: int, **limits) -> None:
        self.scheduler = Scheduler(
            PagePool(num_pages, 16), max_num_seqs=8, max_num_batched_tokens=BUDGET, max_model_len=LONG + 64,
            prefill=PrefillLimits(**limits),
        )  # fmt: skip
        self.every, self.priority = every, priority
        self.arrivals = itertools.count()
        self.launched = deque()
        self.ended = {}

    def add(self, name: str, length: int, priority: int) -> None:
        number = next(self.arrivals)
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        source = EngineRequest(
            request_id=name, prompt_token_ids=[number + 2] * length, params=params, arrival_time=0.0, priority=priority
        )
        self.scheduler.add(expand_choices(source, [0], number))

    def step(self, number: int) -> None:
        for place in range(2 if number % self.every == 0 else 0):
            self.add(f"short {number} {place}", SHORT, self.priority)
        step = self.scheduler.schedule()
        if step is not None:
            self.launched.append(step)
        if self.launched and (step is None or len(self.launched) == 2):
            done = self.launched.popleft()
            for output in self.scheduler.update(done, [RowResult(7)] * done.num_rows):
                if output.finish_reason is not None:
                    self.ended[output.request_id] = number

    def unserved_tokens(self) -> int:
        """What is still to be computed of all the requests that are there."""
        scheduler = self.scheduler
        return sum(r.most_tokens - r.num_computed for r in (*scheduler.running, *scheduler.waiting))


@pytest.mark.parametrize("num_pages", [400, 90])
@pytest.mark.parametrize("limits", [
    {}, {"short_prompt_share": 0.5}, {"short_prompt_share": 0.0}, {"enable_chunked_prefill": False},
    {"max_num_partial_prefills": 3, "max_long_partial_prefills": 1, "long_prefill_token_threshold": 20},
])  # fmt: skip
def test_first_come_first_served(limits, num_pages):
    """Whoever came later can take no more than the share of short prompts, and the rows that decode."""
    crowd = Crowd(num_pages=num_pages, every=1, priority=0, **limits)
    for number in range(ARRIVAL_STEP):
        crowd.step(number)
    assert len(crowd.scheduler.waiting) > 10, "there is more than can be served"
    crowd.add("long", LONG, 0)
    ahead = crowd.unserved_tokens()
    # A long prompt computes at least its threshold a step, if there is one, else what share and decodes leave.
    share = limits.get("short_prompt_share", 0.25)
    a_step = BUDGET * (1 - share) - crowd.scheduler.max_num_seqs
    a_step = min(a_step, limits.get("long_prefill_token_threshold", a_step))
    # Those ahead need their rows: eight at a time, each as many steps as it has tokens to say.
    for_rows = len(crowd.scheduler.waiting) / crowd.scheduler.max_num_seqs * (OUTPUT + 2)
    bound = ARRIVAL_STEP + ahead / a_step + for_rows + OUTPUT + 10
    for number in itertools.count(ARRIVAL_STEP):
        crowd.step(number)
        if "long" in crowd.ended:
            break
        assert number < bound, f"{number - ARRIVAL_STEP} steps for {ahead} tokens"
    assert len(crowd.scheduler.waiting) > 10, "there was more than could be served all the time"


@pytest.mark.parametrize("num_pages", [400, 90])
def test_a_better_priority_goes_past_the_queue(num_pages):
    crowd = Crowd(num_pages=num_pages, every=1, priority=1)
    for number in range(ARRIVAL_STEP):
        crowd.step(number)
    crowd.add("long", LONG, 0)
    bound = ARRIVAL_STEP + LONG / (BUDGET * 0.75 - 8) + 2 * OUTPUT + 10
    for number in itertools.count(ARRIVAL_STEP):
        crowd.step(number)
        if "long" in crowd.ended:
            break
        assert number < bound


@pytest.mark.parametrize("num_pages", [400, 90])
def test_a_worse_priority_gets_what_the_better_leave(num_pages):
    """Better ones that leave tokens and rows do not keep it out; ones that leave none do, as was asked for."""
    every = 3  # 24 of 64 tokens a step, and two thirds of the rows
    crowd = Crowd(num_pages=num_pages, every=every, priority=-1)
    for number in range(ARRIVAL_STEP):
        crowd.step(number)
    crowd.add("long", LONG, 0)
    left = BUDGET - 2 * (SHORT + OUTPUT) / every
    # When pages are short it loses its own to better ones, and computes part of its tokens again.
    bound = ARRIVAL_STEP + 4 * LONG / left + OUTPUT
    for number in itertools.count(ARRIVAL_STEP):
        crowd.step(number)
        if "long" in crowd.ended:
            break
        assert number < bound
