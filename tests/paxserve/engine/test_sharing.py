"""Shared pages on the real engine: choices, salts, prompts that come together, and requests that end early."""

import dataclasses
import time

import pytest

from paxserve.errors import RequestError
from tests.engine_driver import golden_data, make_core, request, run


@pytest.fixture(scope="module")
def core():
    """One engine for all tests here: each forgets the prefixes of the others."""
    return make_core("llama", block_size=4, max_num_batched_tokens=32, scheduling_policy="priority")


def tokens_of(results):
    return {key: result.token_ids for key, result in results.items()}


def test_choices_sample_what_they_would_alone(core):
    assert core.reset_prefix_cache()
    prompt = golden_data("llama")["prompt_1"]
    alone = run(core, [request(str(i), prompt, temperature=0.8, seed=5 + i) for i in range(3)], together=False)
    assert core.reset_prefix_cache()
    before = core.stats()
    queries, hits, tokens = before.prefix_cache_queries, before.prefix_cache_hits, before.prompt_tokens
    choices = run(core, [request("a", prompt, temperature=0.8, seed=5, n=3)])
    assert [choices["a", i].token_ids for i in range(3)] == [alone[str(i), 0].token_ids for i in range(3)]
    stats = core.stats()
    counted = stats.prefix_cache_queries - queries, stats.prefix_cache_hits - hits, stats.prompt_tokens - tokens
    assert counted == (len(prompt), 0, len(prompt)), "the prompt was computed once"


def test_equal_prompts_together_and_under_other_salts(core):
    assert core.reset_prefix_cache()
    data = golden_data("llama")
    prompt, expected = data["prompt_2"], data["greedy_2"].tolist()
    requests = [request(name, prompt) for name in ("a", "b", "salted", "keyed")]
    requests[2].cache_salt = "s"
    requests[3].cache_keys = ["adapter"]
    results = run(core, requests)
    assert all(result.token_ids == expected for result in results.values())
    cached = {name: result.last.num_cached_tokens for (name, _), result in results.items()}
    whole = (len(prompt) - 1) // 4 * 4
    assert cached == {"a": 0, "b": whole, "salted": 0, "keyed": 0}
    again = [dataclasses.replace(r, request_id=f"again {r.request_id}") for r in requests]
    results = run(core, again, together=False)
    assert all(result.token_ids == expected for result in results.values())
    assert {result.last.num_cached_tokens for result in results.values()} == {whole}


def test_a_deadline_ends_a_request_and_frees_its_pages(core):
    late, ready = request("late", [5] * 40, max_tokens=80), request("ready", [6] * 5)
    late.arrival_time, late.timeout = time.time() - 10, 9.5
    ready.arrival_time, ready.timeout = time.time(), 60.0
    results = run(core, [late, ready])
    assert (results["late", 0].last.finish_reason, results["late", 0].last.stop_reason) == ("abort", "timeout")
    assert results["late", 0].token_ids == []
    assert results["ready", 0].finish_reason == "length"


def test_the_lowest_priority_value_goes_first(core):
    order = []
    for name, priority in (("a", 3), ("b", 3), ("c", -3), ("d", 0), ("e", 0), ("f", -1)):
        r = request(name, [ord(name)] * 8, max_tokens=3)
        r.priority = priority
        core.add_request(r)
    core.set_priority("e", -2)
    while core.has_unfinished_requests():
        order += [output.request_id for output in core.step() if output.finish_reason]
        core.check_integrity()
    assert order == ["c", "e", "f", "d", "a", "b"]


def test_priorities_need_the_policy(core, monkeypatch):
    plain = dataclasses.replace(core.config.scheduler, scheduling_policy="fcfs")
    monkeypatch.setattr(core, "config", dataclasses.replace(core.config, scheduler=plain))
    r = request("a", [5])
    r.priority = 1
    with pytest.raises(RequestError, match="scheduling-policy priority") as caught:
        core.add_request(r)
    assert caught.value.param == "priority"
    assert not core.has_unfinished_requests()
