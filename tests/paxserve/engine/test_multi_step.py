import numpy as np
import pytest

from paxserve.engine.decode_steps import DecodeStep
from tests.engine_driver import golden_data, make_core, request, run

AHEAD = 4


def spied(core):
    """The core, with a list of (step, tokens) of every step that it has read."""
    core.steps = []
    read = core.runner.read

    def spy(launched):
        results = read(launched)
        core.steps.append((launched.step, results))
        return results

    core.runner.read = spy
    core.runner.wait_for_programs()
    return core


def steps_of(core):
    """How many decode steps each program ran that has been read since the last call."""
    counts = [step.count for step, _ in core.steps if isinstance(step, DecodeStep)]
    core.steps.clear()
    return counts


@pytest.fixture(scope="module")
def core():
    return spied(make_core("llama", num_scheduler_steps=AHEAD))


def both(core, make):
    """Results with several steps in a program, and, as log-probabilities prevent that, with one."""
    steps_of(core)
    many = run(core, make())
    assert AHEAD in steps_of(core)
    one = run(core, make(logprobs=0))
    assert steps_of(core) == []
    assert many.keys() == one.keys()
    for key, result in many.items():
        assert (result.token_ids, result.finish_reason) == (one[key].token_ids, one[key].finish_reason)
        assert result.last.stop_reason == one[key].last.stop_reason
    return many


def test_greedy_tokens_are_the_goldens(core):
    data = golden_data("llama")
    prompts = [name for name in data if name.startswith("prompt_")]
    results = run(core, [request(name, data[name]) for name in prompts])
    assert AHEAD in steps_of(core)
    for name in prompts:
        assert results[name, 0].token_ids == data[name.replace("prompt", "greedy")].tolist()


def test_sampled_tokens_choices_and_lengths_are_those_of_single_steps(core):
    def make(**params):
        return [
            request("a", [5, 6, 7, 8], max_tokens=23, temperature=0.8, seed=1, top_p=0.9, **params),
            request("b", [9, 10, 11], max_tokens=11, temperature=1.2, seed=3, n=2, **params),
            request("c", [3] * 9, max_tokens=30, temperature=0.7, seed=4, top_k=5, min_p=0.01, **params),
        ]

    results = both(core, make)
    assert [len(result.token_ids) for _, result in sorted(results.items())] == [23, 11, 11, 30]


def test_a_stop_token_ends_its_row_on_the_device(core):
    greedy = run(core, [request("a", [5, 6, 7, 8], max_tokens=20)])["a", 0].token_ids
    place = next(i for i in range(4, 16) if greedy[i] not in greedy[:i])

    def make(**params):
        return [
            request("a", [5, 6, 7, 8], max_tokens=20, stop_token_ids=[greedy[place], 1], **params),
            request("b", [9, 10, 11], max_tokens=27, **params),
        ]

    results = both(core, make)
    assert results["a", 0].token_ids == greedy[: place + 1]
    assert results["a", 0].last.stop_reason == greedy[place]
    run(core, make())
    seen = [(step, tokens) for step, tokens in core.steps if isinstance(step, DecodeStep) and step.num_rows == 2]
    ended = [tokens[:, 0].tolist() for step, tokens in seen if step.count > 1 and tokens[-1, 0] == -1]
    assert ended, "no program saw the row end"
    kept = [token for token in ended[0] if token != -1]
    assert kept == greedy[place + 1 - len(kept) : place + 1]
    assert all(set(later) == {-1} for later in ended[1:])
    core.steps.clear()


def test_min_tokens_penalties_and_stop_strings_take_single_steps_while_they_matter(core):
    run(core, [request("a", [5, 6], max_tokens=20, min_tokens=8, ignore_eos=False, stop_token_ids=[7])])
    assert 0 < sum(steps_of(core)) <= 20 - 8
    run(core, [request("a", [5, 6], max_tokens=20, presence_penalty=0.5)])
    assert steps_of(core) == []
    run(core, [request("a", [5, 6], max_tokens=20, stop=["\n\n"])])
    assert set(steps_of(core)) == {1}
    run(core, [request("a", [5, 6], max_tokens=20, stop_token_ids=list(range(300, 309)))])
    assert set(steps_of(core)) == {1}


def test_an_abort_in_the_middle_drops_the_tokens(core):
    core.add_request(request("a", [5, 6, 7], max_tokens=60))
    core.add_request(request("b", [8, 9], max_tokens=20))
    while AHEAD not in [step.count for step, _ in core.steps]:
        core.step()
    core.abort_requests([("a", None)])
    heard = {"a": [], "b": []}
    while core.has_unfinished_requests():
        for output in core.step():
            heard[output.request_id] += output.new_token_ids
        core.check_integrity()
    assert heard["a"] == []
    assert core.stats().num_pages_in_use == 0
    assert core.stats().recompilations == 0
    core.steps.clear()


def test_an_arrival_waits_for_the_programs_in_flight_and_no_more(core):
    core.add_request(request("a", [5, 6, 7], max_tokens=60))
    while AHEAD not in [step.count for step, _ in core.steps]:
        core.step()
    core.steps.clear()
    core.add_request(request("b", [8, 9], max_tokens=2))
    first = None
    while first is None:
        first = next((output for output in core.step() if output.request_id == "b"), None)
    counts = [step.count for step, _ in core.steps]
    *before, with_b = counts
    assert with_b == 1
    assert sum(before) <= 2 * AHEAD
    core.abort_requests([("a", None), ("b", None)])
    while core.has_unfinished_requests():
        core.step()
    core.steps.clear()


def test_pages_that_fill_within_a_program_are_found_again(core):
    prompt = list(range(20, 31))
    (first,) = run(core, [request("a", prompt, max_tokens=40)]).values()
    (again,) = run(core, [request("b", [*prompt, *first.token_ids], max_tokens=4)]).values()
    page_size = core.model_info.page_size
    known = len(prompt) + len(first.token_ids) - 1  # the last token is never computed
    assert again.last.num_cached_tokens == known // page_size * page_size > len(prompt)
    core.steps.clear()


@pytest.mark.parametrize("flags", [{"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}], ids=["two devices, int8"])
def test_on_several_devices_and_quantised(flags):
    core = spied(make_core("llama", num_scheduler_steps=AHEAD, **flags))

    def make(**params):
        return [
            request("a", [5, 6, 7, 8], max_tokens=18, **params),
            request("b", [9, 10, 11], max_tokens=11, temperature=1.0, seed=3, **params),
        ]

    both(core, make)


@pytest.mark.slow
@pytest.mark.parametrize("golden", ["gemma3_text", "mixtral", "deepseek_v3"])
def test_other_families(golden):
    core, data = spied(make_core(golden, num_scheduler_steps=AHEAD)), golden_data(golden)
    prompts = [name for name in data if name.startswith("prompt_")]
    results = run(core, [request(name, data[name]) for name in prompts])
    assert AHEAD in steps_of(core)
    for name in prompts:
        assert results[name, 0].token_ids == data[name.replace("prompt", "greedy")].tolist()


def test_rows_that_end_leave_the_pages_of_others_alone(core):
    """Rows of all lengths, each compared to itself alone: what a row that has ended writes must be in its own pages."""

    def make():
        numbers = np.random.default_rng(0).integers(1, 40, 8)
        return [request(str(i), [i + 3] * (2 + i), max_tokens=int(number)) for i, number in enumerate(numbers)]

    together, alone = run(core, make()), run(core, make(), together=False)
    assert {key: result.token_ids for key, result in together.items()} == {
        key: result.token_ids for key, result in alone.items()
    }
    core.steps.clear()
