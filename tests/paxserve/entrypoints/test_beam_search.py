"""Beam search over HTTP: what the core is asked for, and what cannot be combined with it."""

import pytest

from paxserve.beam_search_params import BeamSearchParams
from tests.paxserve.serving import Serving, run


def ask(path, **fields):
    async def test(served: Serving):
        what = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
        return await served.post(path, **what, **fields), list(served.client.added)

    return run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_core_is_asked_for_a_search(path):
    response, (request,) = ask(
        path, use_beam_search=True, n=3, max_tokens=7, length_penalty=0.5, early_stopping="never", temperature=0,
        ignore_eos=True, top_p=1.0, stream=False, logit_bias={}, stop=[],
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
    assert response.json()["usage"]["completion_tokens"] == 21
    assert request.beam_search == BeamSearchParams(
        beam_width=3, max_tokens=None, length_penalty=0.5, early_stopping="never"
    )
    assert (request.params.n, request.params.max_tokens, request.params.ignore_eos) == (3, 7, True)


def test_without_use_beam_search_there_is_none():
    response, (request,) = ask("/v1/completions", use_beam_search=False, length_penalty=1.0, early_stopping=False)
    assert response.status_code == 200, response.text
    assert request.beam_search is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("fields", "param"), [
    ({"stream": True}, "stream"),
    ({"temperature": 0.7}, "temperature"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"stop": "x"}, "stop"),
    ({"min_tokens": 2}, "min_tokens"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"n": 129}, "n"),
    ({"n": 25}, "beam_width"),
    ({"length_penalty": 1000}, "length_penalty"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
])  # fmt: skip
def test_what_has_no_meaning_beside_a_search_is_refused_by_name(path, fields, param):
    response, added = ask(path, **{"use_beam_search": True, "max_tokens": 4, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not added


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"echo": True, "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"early_stopping": "always"}, "body.early_stopping"),
])  # fmt: skip
def test_what_one_of_them_refuses(path, fields, param):
    response, added = ask(path, **{"use_beam_search": True, "max_tokens": 4, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert not added
