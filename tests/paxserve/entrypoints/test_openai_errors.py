"""OpenAI's own client on every kind of refusal: which of its classes it raises, and what it reads from the answer."""

import asyncio

import openai
import pytest

from tests.paxserve.entrypoints.test_admin import until
from tests.paxserve.fake_core import CRASH
from tests.paxserve.serving import Serving, run

HELLO = [{"role": "user", "content": "Hello"}]


def client_of(served: Serving, key: str = "secret", **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key=key, http_client=served.http, **{"max_retries": 0, **options}
    )


def refusal(ask, *, key: str = "secret", **server) -> openai.APIStatusError:
    """What `ask` raises on a server with a key, also when it asks for a stream."""

    async def test(served: Serving):
        with pytest.raises(openai.APIStatusError) as raised:
            await ask(client_of(served, key), served)
        return raised.value

    return run(test, api_key=["secret"], admin_api_key=["root"], **server)


async def chat(client: openai.AsyncOpenAI, served: Serving, **options):
    return await client.chat.completions.create(**{"model": "fake", "messages": HELLO, **options})


def with_stream(**options):
    """The chat whole and in a stream: a refusal must be the same."""
    return [
        lambda client, served, more=more: chat(client, served, **options, **more) for more in ({}, {"stream": True})
    ]


@pytest.mark.parametrize(
    ("asks", "key", "kind", "param"),
    [
        (with_stream(temperature=9), "secret", openai.BadRequestError, "temperature"),
        (with_stream(n=1000), "secret", openai.BadRequestError, "n"),
        (with_stream(max_tokens="x"), "secret", openai.BadRequestError, "body.max_tokens"),
        (with_stream(model="other"), "secret", openai.NotFoundError, "model"),
        (with_stream(), "wrong", openai.AuthenticationError, None),
        ([lambda client, served: client.models.retrieve("other")], "secret", openai.NotFoundError, "model"),
        ([lambda client, served: client.get("http://test/server_info", cast_to=object)], "secret",
         openai.PermissionDeniedError, None),
        ([lambda client, served: client.post("http://test/stop_profile", cast_to=object)], "root",
         openai.ConflictError, None),
        (with_stream(messages=[{"role": "user", "content": CRASH}]), "secret", openai.InternalServerError, None),
    ],
)  # fmt: skip
def test_each_refusal_is_of_its_class(asks, key, kind, param):
    for ask in asks:
        error = refusal(ask, key=key)
        assert type(error) is kind
        assert error.param == param
        assert error.code == str(error.status_code)
        assert error.body["message"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("limit", "status", "kind"),
    [
        ({"max_num_queued_reqs": 1}, 429, openai.RateLimitError),
        ({"max_num_queued_tokens": 1}, 429, openai.RateLimitError),
        ({"max_num_queued_reqs": 1, "queue_full_status": 503}, 503, openai.InternalServerError),
    ],
)
def test_a_full_queue_is_a_rate_limit(limit, status, kind, is_stream):
    async def ask(client, served: Serving):
        served.core.step = lambda: []
        waiting = asyncio.ensure_future(chat(client, served))
        await until(lambda: served.core.choices)
        try:
            await chat(client, served, stream=is_stream)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    error = refusal(ask, **limit)
    assert type(error) is kind
    assert error.status_code == status
    assert error.response.headers["retry-after"] == "2"


def test_the_client_tries_a_full_queue_again_by_itself():
    async def test(served: Serving):
        step, served.core.step = served.core.step, lambda: []
        client = client_of(served, max_retries=1)
        first = asyncio.ensure_future(chat(client, served, max_tokens=3))
        await until(lambda: served.core.choices)
        second = asyncio.ensure_future(chat(client, served, max_tokens=3))
        refused = 'reason="max_num_queued_reqs"} 1.0'
        await until(lambda: refused in served.engine.metrics.render().decode())
        served.core.step = step
        return [answer.usage.completion_tokens for answer in await asyncio.gather(first, second)]

    assert run(test, api_key=["secret"], max_num_queued_reqs=1) == [3, 3]


def test_a_server_that_stops_is_unavailable():
    async def ask(client, served: Serving):
        served.engine.admission.state = "draining"
        await chat(client, served)

    error = refusal(ask)
    assert type(error) is openai.InternalServerError
    assert error.status_code == 503
    assert error.response.headers["retry-after"] == "2"
