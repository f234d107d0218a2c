import copy
import dataclasses
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve.errors import RequestError
from paxserve.sampling_params import SamplingParams

BAD = [
    ("n", [0, -1, 129, 1.5, "2", True, None]),
    ("temperature", [-0.1, 2.01, math.nan, math.inf, "1", None, True]),
    ("top_p", [0, -0.1, 1.01, math.nan, None, "x"]),
    ("top_k", [-2, 1.5, None, True, "3"]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("presence_penalty", [-2.1, 2.1, math.inf]),
    ("frequency_penalty", [-2.1, 2.1, math.nan]),
    ("repetition_penalty", [0, -1, math.inf]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "1", True]),
    ("max_tokens", [0, -1, 1.5, "3", True]),
    ("min_tokens", [-1, 17, 1.5, None]),
    ("logprobs", [-2, 1.5, "1"]),
    ("prompt_logprobs", [-2, "x"]),
    ("truncate_prompt_tokens", [0, -2, 1.5]),
    ("stop", [[""], [1], 5, ["a", None]]),
    ("stop_token_ids", [[-1], ["a"], 5, [1.5], [True]]),
    ("allowed_token_ids", [[], ["a"], 3, [True]]),
    ("bad_words", [[""], [1], ["x"] * 129, 5]),
    ("logit_bias", [{"x": 1}, {1: "x"}, {1: math.nan}, {1.5: 1.0}, [1], {1: None}, {True: 1.0}, {1: True}]),
    ("logit_bias", [{1: 10**400}, {1: -math.inf}, "x"]),
    ("ignore_eos", [1, None, "yes"]),
    ("detokenize", ["no"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(name)
    assert caught.value.code == 400


GOOD = [
    ("n", [1, 128]), ("temperature", [0, 2, 1.0]), ("top_p", [1e-6, 1]), ("top_k", [0, 1, 10**6]), ("min_p", [0, 1]),
    ("presence_penalty", [-2, 2]), ("repetition_penalty", [0.01, 5]), ("seed", [None, 0, -5, 2**63 - 1, -(2**63)]),
    ("max_tokens", [None, 1, 10**9]), ("min_tokens", [0, 16]), ("logprobs", [None, -1, 0, 20]),
    ("truncate_prompt_tokens", [None, -1, 1]), ("stop", [["a"], ["a", "b"]]), ("stop_token_ids", [[0, 5]]),
    ("allowed_token_ids", [None, [1]]), ("ignore_eos", [True, False]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD for value in values])
def test_values_at_the_edges_are_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_defaults_are_neutral():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert [params.is_greedy, params.has_penalties, params.has_bias] == [False] * 3
    assert params.all_stop_token_ids == set()


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_other_spellings_are_made_uniform():
    params = SamplingParams(
        stop="x", bad_words="word", seed=-1, top_k=-1, logprobs=True, prompt_logprobs=False, stop_token_ids=None,
        logit_bias={"7": 200, 8: -1000, "-1": 1},
    )  # fmt: skip
    assert (params.stop, params.bad_words, params.seed, params.top_k) == (["x"], ["word"], None, 0)
    assert (params.logprobs, params.prompt_logprobs, params.stop_token_ids) == (1, None, [])
    assert params.logit_bias == {7: 100.0, 8: -100.0, -1: 1.0}


def test_greedy_resets_what_it_makes_void_and_wants_one_choice():
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(RequestError, match="n must be 1 when using greedy sampling, got 2"):
        SamplingParams(temperature=0.0, n=2)
    assert SamplingParams(temperature=0.001).temperature == 0.01


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_lists_are_not_shared_with_the_caller():
    stop, token_ids = ["x"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=token_ids, allowed_token_ids=token_ids)
    stop.append("y")
    token_ids.append(2)
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (["x"], [1], [1])


def test_what_ends_an_output():
    params = SamplingParams(stop_token_ids=[4])
    params.eos_token_ids = [1, 2]
    assert params.all_stop_token_ids == {1, 2, 4}
    assert dataclasses.replace(params, ignore_eos=True).all_stop_token_ids == {4}


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(-1, 100),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        stop=st.lists(st.text(min_size=1), max_size=3),
        max_tokens=st.none() | st.integers(1, 100),
        logprobs=st.none() | st.integers(-1, 20),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-200, 200)),
    )
)
def test_parameters_pass_between_processes_unchanged(params):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert copy.deepcopy(params) == dataclasses.replace(params) == params
