"""Beam search against transformers' (`tests/beam_reference.py`), and its pages when there are too few of them."""

import json

import pytest

from paxserve.beam_search_params import BeamSearchParams
from paxserve.config import EngineConfig
from paxserve.engine.beam_search import BeamSearch
from paxserve.engine.engine_core import EngineCore
from paxserve.errors import RequestError
from paxserve.messages import EngineRequest, TokenLogprobs
from paxserve.sampling_params import SamplingParams
from tests.engine_driver import GOLDENS, make_core, request, run

CASES = json.loads((GOLDENS / "beams.json").read_text())
TOLERANCE = 1e-3
"""Of a whole output's log-probability; a score is that times a number that depends on the penalty."""
FLAGS = {"block_size": 4, "max_num_seqs": 6, "compile_sizes": [32], "num_gpu_blocks_override": 40}


@pytest.fixture(scope="module")
def llama():
    """One engine for all: compiling takes nearly all the time. Forty pages, so that some searches run out of them."""
    return make_core("llama", **FLAGS)


def search_request(name: str, case: dict, **fields) -> EngineRequest:
    """The request of a case of the reference."""
    params = SamplingParams(
        n=case["beam_width"], max_tokens=case["max_tokens"], eos_token_ids=case["eos_token_ids"], temperature=1.0
    )
    settings = {key: case[key] for key in ("beam_width", "max_tokens", "length_penalty", "early_stopping")}
    return EngineRequest(
        request_id=name, prompt_token_ids=case["prompt"], params=params, arrival_time=0.0,
        beam_search=BeamSearchParams(**settings), **fields,
    )  # fmt: skip


def check(case: dict, results: dict, name: str) -> None:
    for index, (tokens, score) in enumerate(zip(case["sequences"], case["scores"], strict=True)):
        result = results[name, index]
        assert result.token_ids == tokens
        assert result.finish_reason == ("stop" if tokens[-1] in case["eos_token_ids"] else "length")
        assert abs(result.last.cumulative_logprob - score * len(tokens) ** case["length_penalty"]) < TOLERANCE


def check_all(name: str, core: EngineCore) -> None:
    """One by one, then all at once on few pages, where beams lose theirs and are computed again."""
    cases = CASES[name]
    assert any(len(tokens) < case["max_tokens"] for case in cases for tokens in case["sequences"])
    requests = [search_request(str(number), case) for number, case in enumerate(cases)]
    for together in (False, True):
        core.reset_prefix_cache()
        results = run(core, requests, together=together)
        for number, case in enumerate(cases):
            check(case, results, str(number))
    assert core.stats().num_preemptions > 0


def test_beams_are_those_of_transformers(llama):
    check_all("llama", llama)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("flags", [{}, {"enable_prefix_caching": False, "async_scheduling": False}])
def test_beams_of_other_models_are_those_of_transformers(name, flags):
    # Three layers of Gemma's kind have a page table each, and a page holds a third as much.
    pages = FLAGS["num_gpu_blocks_override"] * (3 if name == "gemma3_text" else 1)
    check_all(name, make_core(name, **(FLAGS | flags | {"num_gpu_blocks_override": pages})))


@pytest.mark.parametrize("count", [0, 2, -1])
def test_log_probabilities_of_beams_add_up(llama, count):
    case = CASES["llama"][1]
    source = search_request("a", case)
    source.params.logprobs = count
    results = run(llama, [source, search_request("plain", case)])
    check(case, results, "a")
    for index in range(case["beam_width"]):
        result = results["a", index]
        assert [entry.token_ids[0] for entry in result.logprobs] == result.token_ids
        assert sum(entry.logprobs[0] for entry in result.logprobs) == pytest.approx(result.last.cumulative_logprob)
        for entry in result.logprobs:
            assert len(entry.token_ids) == len(entry.logprobs) == 1 + (count if count >= 0 else 320)
            assert entry.rank > count >= 0 or entry.token_ids[entry.rank] == entry.token_ids[0]
        assert not results["plain", index].logprobs


def test_beams_share_pages_and_leave_none(llama):
    core = llama
    case = {"prompt": list(range(5, 45)), "beam_width": 5, "max_tokens": 20, "eos_token_ids": [], "length_penalty": 1.0,
            "early_stopping": False}  # fmt: skip
    core.add_request(search_request("a", case))
    core.add_request(request("b", [7] * 9, max_tokens=30))
    ratios = []
    while core.scheduler.running or core.scheduler.waiting:
        core.step()
        core.check_integrity()
        beams = [r for r in core.scheduler.running if r.request_id == "a"]
        if len(beams) == 5:
            ratios.append(len({page for r in beams for page in r.pages}) / sum(len(r.pages) for r in beams))
    assert max(ratios) < 0.6, "ten pages of the prompt are held five times over"
    while core.has_unfinished_requests():
        core.step()
    assert core.stats().num_pages_in_use == 0


def test_a_search_ends_where_the_context_does(llama):
    case = CASES["llama"][0] | {"prompt": [7] * 120, "max_tokens": 40}
    results = run(llama, [search_request("a", case)])
    assert [len(results["a", index].token_ids) for index in range(2)] == [9, 9]
    assert results["a", 0].finish_reason == "length"


def test_an_abort_or_a_deadline_ends_all_beams(llama):
    core = llama
    case = CASES["llama"][0] | {"max_tokens": 40}
    core.add_request(search_request("a", case))
    core.add_request(search_request("late", case, timeout=0.001))
    outputs = core.step()
    assert [(o.request_id, o.index, o.stop_reason) for o in outputs] == [("late", i, "timeout") for i in range(2)]
    for _ in range(8):
        core.step()
        core.check_integrity()
    assert len(core.scheduler.running) == 2
    core.abort_requests([("a", None)])
    core.check_integrity()
    assert core.scheduler.pool.num_in_use == 0
    assert [(o.index, o.finish_reason) for o in core.step()] == [(i, "abort") for i in range(2)]
    with pytest.raises(RequestError, match="at most max_num_seqs=6"):
        core.add_request(search_request("wide", case | {"beam_width": 7}))


def test_a_search_by_hand():
    """Two beams over tokens 1 to 3, of which 3 ends: what is complete is kept while something better may come."""
    params = BeamSearchParams(beam_width=2, length_penalty=1.0)
    search = BeamSearch(params, {3}, max_tokens=3)
    assert search.num_candidates == 3

    def entry(**logprobs):
        tokens = [int(name[1:]) for name in logprobs]
        return TokenLogprobs([9, *tokens], [0.0, *logprobs.values()], 1)

    first = search.advance([[]], [entry(t1=-1.0, t3=-1.5, t2=-2.0)])
    assert [(c.beam, c.token, c.logprob) for c in first] == [(0, 1, -1.0), (0, 2, -2.0)]
    assert [(h.token_ids, h.score) for h in search.hypotheses] == [([3], -1.5)]
    # The second place goes to an end as well; the best beam, at -1.25 a token, may beat -1.5 yet.
    second = search.advance([[1], [2]], [entry(t2=-1.5, t3=-1.6, t1=-9.0), entry(t1=-4.0, t2=-5.0, t3=-6.0)])
    assert [(c.beam, c.token) for c in second] == [(0, 2), (1, 1)]
    assert [h.token_ids for h in search.hypotheses] == [[1, 3], [3]]
    third = search.advance([[1, 2], [2, 1]], [entry(t1=-0.5, t2=-3.0, t3=-4.0), entry(t1=-1.0, t2=-2.0, t3=-3.0)])
    assert third == []
    assert [h.token_ids for h in search.hypotheses] == [[1, 2, 1], [1, 3]]


@pytest.mark.parametrize("fields", [
    {"beam_width": 0}, {"beam_width": 129}, {"beam_width": True}, {"max_tokens": 0}, {"length_penalty": "1"},
    {"length_penalty": float("nan")}, {"early_stopping": "always"},
])  # fmt: skip
def test_parameters_that_are_refused(fields):
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, **fields})
    assert caught.value.param == next(iter(fields))


@pytest.mark.slow
def test_smollm2_finds_what_transformers_finds():
    flags = {"max_num_seqs": 8, "max_model_len": 256, "compile_sizes": [8], "max_num_batched_tokens": 64}
    core = EngineCore(EngineConfig.from_flags(model="smollm2-135m-instruct", **flags))
    cases = CASES["smollm2"]
    results = run(core, [search_request(str(number), case) for number, case in enumerate(cases)])
    for number, case in enumerate(cases):
        check(case, results, str(number))
