import asyncio

import pytest

from tests.paxserve.entrypoints.test_app import value_of
from tests.paxserve.entrypoints.test_errors import check_shape
from tests.paxserve.fake_core import SCRIPT
from tests.paxserve.serving import Serving, run, until

ADMIN = {"Authorization": "Bearer root"}
PATHS = [
    ("POST", "/reset_prefix_cache"), ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"),
    ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/abort_requests"),
    ("GET", "/server_info"), ("POST", "/start_profile"), ("POST", "/stop_profile"),
]  # fmt: skip


def administer(test, **server):
    async def with_key(served: Serving):
        async def ask(method, path, **options):
            return await served.http.request(method, path, headers=ADMIN, **options)

        return await test(served, ask)

    return run(with_key, admin_api_key=["root"], **server)


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_admin_routes_exist_only_with_their_key(method, path):
    async def test(served: Serving):
        user = {"Authorization": "Bearer secret"}
        return [(await served.http.request(method, path, headers=headers)).status_code for headers in ({}, user, ADMIN)]

    assert run(test) == [404, 404, 404]
    assert run(test, api_key=["secret"]) == [401, 404, 401]
    without, user, admin = run(test, api_key=["secret"], admin_api_key=["root"])
    assert (without, user) == (401, 403)
    assert admin in (200, 409)


def test_every_admin_route_is_in_the_list():
    async def test(served: Serving, ask):
        schema = (await ask("GET", "/openapi.json")).json()
        return {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}

    assert administer(test) - run(lambda served: schema_of(served)) == set(PATHS)


async def schema_of(served: Serving):
    schema = (await served.http.get("/openapi.json")).json()
    return {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}


def test_sleep_ends_requests_and_refuses_new_ones_until_it_wakes_up():
    async def test(served: Serving, ask):
        served.core.step_seconds = 0.01
        running = asyncio.ensure_future(served.complete(max_tokens=400))
        await until(lambda: served.core.choices)
        slept = await ask("POST", "/sleep?level=1")
        metrics = (await served.http.get("/metrics")).text
        state = (await ask("GET", "/is_sleeping")).json()
        again = await ask("POST", "/sleep")
        refused = await served.complete(max_tokens=1, stream=True)
        woken = await ask("POST", "/wake_up")
        after = (await ask("GET", "/is_sleeping")).json(), await served.complete(max_tokens=1)
        return (await running).json(), slept, metrics, state, again, refused, woken, after

    ended, slept, metrics, state, again, refused, woken, after = administer(test)
    assert ended["choices"][0]["finish_reason"] == "abort"
    assert slept.json() == {"status": "sleeping", "level": 1}
    assert value_of(metrics, "vllm:engine_sleep_state", sleep_state="weights_offloaded") == 1
    assert value_of(metrics, "vllm:engine_sleep_state", sleep_state="awake") == 0
    assert state == {"is_sleeping": True}
    check_shape(again, 409)
    check_shape(refused, 503, "ServiceUnavailableError")
    assert refused.headers["retry-after"] == "2"
    assert woken.json() == {"status": "awake", "tags": None}
    assert after[0] == {"is_sleeping": False}
    assert after[1].status_code == 200


def test_level_2_throws_the_weights_away():
    async def test(served: Serving, ask):
        slept = (await ask("POST", "/sleep?level=2")).json()
        metrics = (await served.http.get("/metrics")).text
        await ask("POST", "/wake_up")
        return slept, metrics, (await served.complete(max_tokens=1)).status_code

    slept, metrics, after = administer(test)
    assert slept == {"status": "sleeping", "level": 2}
    assert value_of(metrics, "vllm:engine_sleep_state", sleep_state="discard_all") == 1
    assert after == 200


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/sleep?level=0&mode=keep"])
def test_requests_that_are_kept_go_on_where_they_stopped(path):
    async def test(served: Serving, ask):
        served.core.step_seconds = 0.005
        running = asyncio.ensure_future(served.complete(max_tokens=30))
        await until(lambda: served.core.counters.generation_tokens >= 5)
        await ask("POST", path)
        count = served.core.counters.generation_tokens
        held = asyncio.ensure_future(served.complete(max_tokens=3))
        await asyncio.sleep(0.1)
        stopped = served.core.counters.generation_tokens == count < 30, running.done(), held.done()
        await ask("POST", "/resume")
        return stopped, (await running).json()["choices"][0], (await held).json()["choices"][0]["text"]

    stopped, kept, held = administer(test)
    assert stopped == (True, False, False)
    assert kept["finish_reason"] == "length"
    assert kept["text"] == (SCRIPT * 2)[: len(kept["text"])]
    assert held == SCRIPT[:3]


@pytest.mark.parametrize("path", ["/pause?mode=abort", "/sleep"])
def test_kept_requests_can_still_be_ended(path):
    async def test(served: Serving, ask):
        served.core.step_seconds = 0.005
        running = asyncio.ensure_future(served.complete(max_tokens=300))
        await until(lambda: served.core.choices)
        await ask("POST", "/pause?mode=keep")
        answer = await ask("POST", path)
        return answer.status_code, (await running).json()["choices"][0]["finish_reason"], served.core.choices

    assert administer(test) == (200, "abort", {})


def test_a_pause_holds_new_requests_back():
    async def test(served: Serving, ask):
        served.core.step_seconds = 0.005
        running = asyncio.ensure_future(served.complete(max_tokens=30))
        await until(lambda: served.core.choices)
        await ask("POST", "/pause?mode=wait")
        finished = (await running).json()["choices"][0]["finish_reason"]
        held = asyncio.ensure_future(served.complete(max_tokens=3))
        await asyncio.sleep(0.1)
        was_held = not held.done() and not served.core.choices
        state = (await ask("GET", "/is_paused")).json()
        await ask("POST", "/resume")
        return (
            finished,
            was_held,
            state,
            (await held).json(),
            (await ask("GET", "/is_paused")).json(),
            served.core.resets,
        )

    finished, was_held, state, held, after, resets = administer(test)
    assert finished == "length"
    assert was_held
    assert state == {"is_paused": True}
    assert held["choices"][0]["text"] == SCRIPT[:3]
    assert after == {"is_paused": False}
    assert resets == 1


def test_answers_are_ended_by_their_ids():
    async def test(served: Serving, ask):
        served.core.step_seconds = 0.01
        named = asyncio.ensure_future(served.complete(["a", "b"], max_tokens=300, request_id="one-1"))
        other = asyncio.ensure_future(served.chat(max_tokens=300, request_id="two", stream=True))
        await until(lambda: len(served.core.choices) == 3)
        await asyncio.sleep(0.05)
        counts = [
            (await ask("POST", "/abort_requests", json={"request_ids": ids})).json()["aborted"]
            for ids in (["cmpl-one"], ["cmpl-one-1", "none"], ["cmpl-one-1"], None)
        ]
        return counts, (await named).json(), (await other).text, len(served.core.choices)

    counts, named, other, left = administer(test)
    assert counts == [0, 2, 0, 1]
    assert [choice["finish_reason"] for choice in named["choices"]] == ["abort", "abort"]
    assert named["choices"][0]["text"]
    assert '"finish_reason":"abort"' in other
    assert other.endswith("data: [DONE]\n\n")
    assert left == 0


def test_the_configuration_is_shown_without_secrets():
    async def test(served: Serving, ask):
        return await ask("GET", "/server_info")

    response = administer(test, api_key=["secret"])
    info = response.json()
    assert info["config"]["server"]["api_key"] == info["config"]["server"]["admin_api_key"] == "***"
    assert info["config"]["engine"]["model"]["model"] == "fake"
    assert info["model"]["max_model_len"] == 512
    assert '"root"' not in response.text
    assert "secret" not in response.text


@pytest.mark.parametrize(
    "path",
    ["/sleep?level=3", "/sleep?level=x", "/sleep?mode=later", "/sleep?mode=keep", "/wake_up?tags=weights",
     "/pause?mode=x", "/reset_prefix_cache?reset_running_requests=true", "/reset_prefix_cache?reset_external=true"],
)  # fmt: skip
def test_what_is_not_offered_is_refused(path):
    async def test(served: Serving, ask):
        return await ask("POST", path), (await ask("GET", "/is_sleeping")).json()

    response, state = administer(test)
    check_shape(response, 400)
    assert state == {"is_sleeping": False}


def test_profiles_and_the_prefix_cache():
    async def test(served: Serving, ask):
        paths = ("/stop_profile", "/start_profile", "/start_profile", "/stop_profile")
        codes = [(await ask("POST", path)).status_code for path in paths]
        return codes, (await ask("POST", "/reset_prefix_cache")).json(), served.core.resets

    assert administer(test) == ([409, 200, 409, 200], {"success": True}, 1)


@pytest.mark.parametrize(("server", "code", "kind"), [
    ({}, 429, "RateLimitError"), ({"queue_full_status": 503}, 503, "ServiceUnavailableError"),
])  # fmt: skip
def test_a_full_queue_sheds(server, code, kind):
    async def test(served: Serving):
        step, served.core.step = served.core.step, lambda: []
        waiting = [asyncio.ensure_future(served.complete(max_tokens=2)) for _ in range(3)]
        await until(lambda: len(served.core.choices) == 3)
        refused = await served.complete(max_tokens=2, stream=True)
        served.core.step = step
        done = [response.status_code for response in await asyncio.gather(*waiting)]
        return (
            refused,
            done,
            (await served.complete(max_tokens=2)).status_code,
            (await served.http.get("/metrics")).text,
        )

    refused, done, after, metrics = run(test, max_num_queued_reqs=3, **server)
    error = check_shape(refused, code, kind)
    assert "overloaded" in error["message"]
    assert refused.headers["retry-after"] == "2"
    assert done == [200, 200, 200]
    assert after == 200
    assert 'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"} 1.0' in metrics
