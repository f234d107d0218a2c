import pytest

from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import RowResult, Scheduler
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams

EOS = 2


class Driver:
    """A scheduler with a fake device that always samples token 7."""

    def __init__(self, *, num_pages=64, page_size=4, seqs=8, budget=16, **kwargs):
        self.pool = PagePool(num_pages, page_size)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=256, **kwargs
        )
        self.outputs = {}
        self.count = 0

    def add(self, request_id, prompt, **params):
        params = SamplingParams(eos_token_ids=[EOS], **{"max_tokens": 4, **params})
        request = EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), params=params, arrival_time=0.0)
        self.scheduler.add(expand_choices(request, list(range(params.n)), self.count))
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
