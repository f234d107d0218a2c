import pytest

from paxserve.engine.kv_cache import PagePool
from paxserve.engine.prefill_limits import PrefillLimits
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams

EOS = 2


class Driver:
    """A scheduler with a fake device that always samples token 7."""

    def __init__(self, *, num_pages=64, page_size=4, seqs=8, budget=16, **limits):
        self.pool = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=256,
            prefill=PrefillLimits(**limits),
        )  # fmt: skip
        self.outputs = {}
        self.count = 0

    def add(self, request_id, prompt, *, priority=0, cache_salt=None, cache_keys=(), deadline=None, **params):
        params = SamplingParams(eos_token_ids=[EOS], **{"max_tokens": 4, **params})
        request = EngineRequest(
            request_id=request_id, prompt_token_ids=list(prompt), params=params, arrival_time=0.0, priority=priority,
            cache_salt=cache_salt, cache_keys=list(cache_keys),
        )  # fmt: skip
        self.scheduler.add(expand_choices(request, list(range(params.n)), self.count), deadline)
        self.count += 1

    def schedule(self):
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return step

    def finish(self, step, token=7):
        for output in self.scheduler.update(step, [RowResult(token) for _ in step.rows]):
            self.outputs.setdefault((output.request_id, output.index), []).append(output)
        self.scheduler.check_integrity()

    def run(self, limit=200):
        for _ in range(limit):
            step = self.schedule()
            if step is None:
                return
            self.finish(step)
        raise AssertionError("the scheduler does not come to an end")


def shape_of(step):
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in step.rows]


def test_a_long_prompt_is_computed_in_chunks_beside_a_running_request():
    driver = Driver(budget=8)
    driver.add("a", range(10, 14))
    first = driver.schedule()
    assert shape_of(first) == [("a", 0, 4, True)]
    driver.finish(first)
    driver.add("b", range(20, 40))
    steps = []
    for _ in range(3):
        steps.append(driver.schedule())
        driver.finish(steps[-1])
    assert shape_of(steps[0]) == [("a", 4, 1, True), ("b", 0, 7, False)]
    assert shape_of(steps[1]) == [("a", 5, 1, True), ("b", 7, 7, False)]
    assert shape_of(steps[2]) == [("a", 6, 1, True), ("b", 14, 6, True)]


def test_a_step_is_planned_before_the_tokens_of_the_last_one_are_read():
    driver = Driver()
    driver.add("a", range(10, 14), max_tokens=3)
    steps = [driver.schedule() for _ in range(3)]
    assert [shape_of(step) for step in steps] == [[("a", 0, 4, True)], [("a", 4, 1, True)], [("a", 5, 1, True)]]
    assert driver.schedule() is None, "the length limit is known without reading tokens"
    for step in steps:
        driver.finish(step)
    assert [o.finish_reason for o in driver.outputs["a", 0]] == [None, None, "length"]
    assert driver.pool.num_in_use == 0


def test_the_token_after_a_stop_is_dropped():
    driver = Driver()
    driver.add("a", range(10, 14))
    first, second = driver.schedule(), driver.schedule()
    driver.finish(first, token=EOS)
    driver.finish(second)
    (output,) = driver.outputs["a", 0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert not driver.scheduler.has_unfinished()


def test_a_stop_token_id_is_named_and_barred_by_min_tokens():
    driver = Driver()
    driver.add("a", range(10, 14), stop_token_ids=[7], min_tokens=2, max_tokens=8)
    driver.run()
    outputs = driver.outputs["a", 0]
    assert len(outputs) == 3
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", 7)


def test_the_last_arrival_is_preempted_and_both_end():
    driver = Driver(num_pages=6, budget=32)
    driver.add("a", range(100, 110), max_tokens=12)
    driver.add("b", range(200, 210), max_tokens=12)
    driver.run()
    assert {key: len(outputs) for key, outputs in driver.outputs.items()} == {("a", 0): 12, ("b", 0): 12}
    assert driver.outputs["a", 0][-1].num_preemptions == 0
    assert driver.outputs["b", 0][-1].num_preemptions > 0
    assert driver.pool.num_in_use == 0


def test_a_prefix_is_found_again_and_the_last_token_always_computed():
    driver = Driver(budget=64)
    driver.add("a", range(100, 116))
    driver.run()
    driver.add("b", range(100, 116))
    step = driver.schedule()
    assert shape_of(step) == [("b", 12, 4, True)]
    assert step.rows[0].request.num_cached_tokens == 12
    driver.finish(step)
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (32, 12)


def test_pages_can_be_shared_one_step_after_they_were_scheduled():
    driver = Driver(budget=16)
    driver.add("a", range(100, 116))
    driver.add("b", range(100, 120))
    driver.schedule()
    assert shape_of(driver.schedule()) == [("a", 16, 1, True), ("b", 16, 4, True)]


def test_choices_share_the_prompt_and_copy_only_the_partial_page():
    driver = Driver(budget=64)
    driver.add("a", range(100, 110), n=3, temperature=1.0, seed=1)
    first = driver.schedule()
    assert shape_of(first) == [("a", 0, 10, True)]
    second = driver.schedule()
    assert [row.num_tokens for row in second.rows] == [1, 1, 1]
    leader, *others = driver.scheduler.running
    assert [source for source, _ in second.page_copies] == [leader.pages[2]] * 2
    for (_, copy), choice in zip(second.page_copies, others, strict=True):
        assert choice.pages[:2] == leader.pages[:2]
        assert choice.pages[2] == copy != leader.pages[2]
    driver.finish(first)
    driver.finish(second)
    driver.run()
    assert {key: len(outputs) for key, outputs in driver.outputs.items()} == {("a", i): 4 for i in range(3)}
    assert driver.pool.num_in_use == 0


def test_an_abort_frees_everything_at_once_even_in_flight():
    driver = Driver()
    driver.add("a", range(10, 30), n=2, temperature=1.0)
    step = driver.schedule()
    driver.scheduler.abort("a")
    driver.scheduler.check_integrity()
    assert driver.pool.num_in_use == 0
    driver.finish(step)
    assert not driver.outputs
    assert not driver.scheduler.has_unfinished()


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step():
    driver = Driver(budget=16, enable_chunked_prefill=False)
    driver.add("a", range(10, 20))
    driver.add("b", range(20, 30))
    assert shape_of(driver.schedule()) == [("a", 0, 10, True)]
    assert shape_of(driver.schedule()) == [("a", 10, 1, True), ("b", 0, 10, True)]


def test_a_sequence_that_fills_the_whole_pool_ends_by_length():
    driver = Driver(num_pages=4)
    driver.add("a", range(10, 20), max_tokens=None)
    driver.run()
    assert driver.outputs["a", 0][-1].finish_reason == "length"
    assert len(driver.outputs["a", 0]) == 4 * 4 - 10 + 1


@pytest.mark.parametrize("words", [[[5]], [[5, 6]]])
def test_only_bad_words_of_several_tokens_hold_back_the_pipeline(words):
    driver = Driver()
    driver.add("a", range(10, 14), bad_words_token_ids=words)
    driver.schedule()
    assert (driver.schedule() is None) == (len(words[0]) > 1)


def test_of_two_equal_prompts_in_one_step_the_second_waits_for_the_pages_of_the_first():
    driver = Driver(budget=64)
    driver.add("a", range(100, 118))
    driver.add("b", range(100, 118))
    driver.add("c", range(200, 210))
    assert shape_of(driver.schedule()) == [("a", 0, 18, True), ("c", 0, 10, True)]
    second = driver.schedule()
    assert shape_of(second) == [("a", 18, 1, True), ("c", 10, 1, True), ("b", 16, 2, True)]
    assert second.rows[2].request.pages[:4] == second.rows[0].request.pages[:4]


def test_the_second_of_two_equal_prompts_follows_the_first_through_its_chunks():
    driver = Driver(budget=8)
    driver.add("a", range(100, 118))
    driver.add("b", [*range(100, 112), *range(300, 306)])
    assert [shape_of(driver.schedule()) for _ in range(3)] == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 2, True), ("b", 12, 6, True)],  # a's fourth page is not b's: b has all it can share
    ]


def test_the_second_of_two_equal_prompts_computes_when_the_first_is_aborted_halfway():
    driver = Driver(budget=8)
    driver.add("a", range(100, 118))
    driver.add("b", range(100, 118))
    first = driver.schedule()
    driver.scheduler.abort("a")
    assert shape_of(driver.schedule()) == [("b", 8, 8, False)]
    driver.finish(first)
    driver.run()
    assert len(driver.outputs["b", 0]) == 4


@pytest.mark.parametrize("keys", [{"cache_salt": "s"}, {"cache_keys": ["adapter"]}])
def test_nothing_is_shared_across_salts_and_keys(keys):
    driver = Driver(budget=64)
    driver.add("a", range(100, 116))
    driver.add("b", range(100, 116), **keys)
    assert shape_of(driver.schedule()) == [("a", 0, 16, True), ("b", 0, 16, True)]
    driver.run()
    driver.add("c", range(100, 116), **keys)
    assert shape_of(driver.schedule()) == [("c", 12, 4, True)]


def test_no_page_is_lost_between_lookup_and_use():
    """The only free pages are those found in the cache: they cannot be both shared and handed out."""
    driver = Driver(num_pages=6, budget=64)
    driver.add("a", range(100, 116))
    driver.run()
    driver.add("b", range(200, 206))
    first = driver.schedule()
    driver.add("c", [*range(100, 116), 5, 6, 7, 8])
    second = driver.schedule()
    assert [row.request.request_id for row in second.rows] == ["b"]
    driver.finish(first)
    driver.finish(second)
    driver.run()
    assert len(driver.outputs["c", 0]) == 4


def test_priority_then_arrival_decides_who_starts_and_who_gives_up_its_pages():
    driver = Driver(num_pages=8, seqs=2, budget=64)
    for name, priority in (("a", 5), ("b", 5), ("c", -1), ("d", 0)):
        driver.add(name, range(100 * ord(name), 100 * ord(name) + 10), priority=priority, max_tokens=8)
    first = driver.schedule()
    assert [row.request.request_id for row in first.rows] == ["c", "d"]
    driver.finish(first)
    driver.run()
    last = {name: driver.outputs[name, 0][-1] for name in "abcd"}
    assert {name: output.num_preemptions > 0 for name, output in last.items()} == {
        "a": False, "b": True, "c": False, "d": True,
    }  # fmt: skip


def test_a_changed_priority_moves_a_waiting_request():
    driver = Driver(seqs=1)
    for name in "abc":
        driver.add(name, range(10, 14))
    driver.schedule()
    driver.scheduler.set_priority("c", -1)
    driver.scheduler.set_priority("nobody", 3)
    driver.scheduler.check_integrity()
    assert [request.request_id for request in driver.scheduler.waiting] == ["c", "b"]


def test_a_deadline_ends_a_request_wherever_it_stands_and_frees_everything():
    driver = Driver(seqs=1)
    driver.add("a", range(10, 30), deadline=5.0, n=2, temperature=1.0)
    driver.add("b", range(10, 30), deadline=5.0)
    driver.add("c", range(10, 30), deadline=7.0)
    step = driver.schedule()
    assert driver.scheduler.expire(4.9) == []
    outputs = driver.scheduler.expire(5.0)
    driver.scheduler.check_integrity()
    assert [(o.request_id, o.index, o.finish_reason, o.stop_reason) for o in outputs] == [
        ("a", 0, "abort", "timeout"), ("a", 1, "abort", "timeout"), ("b", 0, "abort", "timeout"),
    ]  # fmt: skip
    assert driver.pool.num_in_use == 0
    driver.finish(step)
    driver.run()
    assert driver.scheduler.expire(100.0) == [], "c has ended by itself"
    driver.add("c", range(10, 30))
    assert driver.scheduler.expire(200.0) == [], "another request of that name has no deadline"


def test_a_long_prompt_leaves_room_in_every_step_and_short_ones_pass_it():
    driver = Driver(budget=16, long_prefill_token_threshold=6, max_num_partial_prefills=2, max_long_partial_prefills=1)
    driver.add("a", range(100, 118))
    driver.add("b", range(200, 218))
    driver.add("c", range(300, 305))
    driver.add("d", range(400, 406))
    assert shape_of(driver.schedule()) == [("a", 0, 6, False), ("c", 0, 5, True), ("d", 0, 5, False)]
    assert shape_of(driver.schedule()) == [("c", 5, 1, True), ("d", 5, 1, True), ("a", 6, 6, False)]
    assert shape_of(driver.schedule()) == [
        ("c", 6, 1, True), ("d", 6, 1, True), ("a", 12, 6, True), ("b", 0, 6, False),
    ]  # fmt: skip


def test_a_long_prompt_is_served_in_bounded_time_under_a_stream_of_short_ones():
    driver = Driver(num_pages=256, seqs=4, budget=8)
    for name in range(4):
        driver.add(f"first{name}", range(10, 18), max_tokens=5)
    driver.add("long", range(1000, 1200), max_tokens=2)
    for step in range(400):
        driver.add(f"short{step}", range(10, 18), max_tokens=5)
        driver.finish(driver.schedule())
        if len(driver.outputs.get(("long", 0), ())) == 2:
            break
    # Others take at most three of the eight tokens of a step, once one of the first four has ended.
    assert step < 20 + 200 / 5


@pytest.mark.parametrize(("share", "seen"), [(0.25, True), (0.0, False)])
def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_before(share, seen):
    driver = Driver(num_pages=128, budget=16, short_prompt_share=share)
    driver.add("long", range(1000, 1100), max_tokens=1)
    first = driver.schedule()
    driver.add("big", range(300, 305), max_tokens=1)  # above the share: in order of arrival
    driver.add("short", range(400, 404), max_tokens=1)
    driver.add("next", range(500, 504), max_tokens=1)  # the share is spent
    assert shape_of(first) == [("long", 0, 16, False)]
    ordered = [("long", 16, 16, False)]
    second = driver.schedule()
    assert shape_of(second) == ([("short", 0, 4, True), ("long", 16, 12, False)] if seen else ordered)
    driver.finish(first)
    driver.finish(second)
    driver.run()
    assert len(driver.outputs) == 4


def test_a_long_prompt_loses_no_more_than_the_share_to_short_ones_without_end():
    driver = Driver(num_pages=256, seqs=8, budget=16)
    driver.add("long", range(1000, 1200), max_tokens=1)
    for step in range(100):
        driver.add(f"short{step}", range(2000 + 8 * step, 2004 + 8 * step), max_tokens=1)
        driver.finish(driver.schedule())
        if ("long", 0) in driver.outputs:
            break
    assert step == pytest.approx(200 / 12, abs=1)
    assert len(driver.outputs) >= step


def test_no_short_prompt_overtakes_one_of_better_priority_or_takes_the_last_pages():
    driver = Driver(num_pages=128, budget=16)
    driver.add("long", range(1000, 1100), max_tokens=1)
    driver.finish(driver.schedule())
    driver.add("worse", range(300, 304), max_tokens=1, priority=1)
    assert shape_of(driver.schedule()) == [("long", 16, 16, False)]
    scarce = Driver(num_pages=26, budget=16)  # 25 of them are the long one's
    scarce.add("long", range(1000, 1100), max_tokens=1)
    scarce.finish(scarce.schedule())
    scarce.add("short", range(300, 304), max_tokens=1)
    for _ in range(5):
        step = scarce.schedule()
        assert {name for name, *_ in shape_of(step)} == {"long"}
        scarce.finish(step)
    scarce.run()
    assert set(scarce.outputs) == {("long", 0), ("short", 0)}
