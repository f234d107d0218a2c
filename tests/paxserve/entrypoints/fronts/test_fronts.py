"""Two front processes of one server: what is asked of one and known to the other."""

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.paxserve.entrypoints.test_app import value_of
from tests.paxserve.fake_core import SCRIPT
from tests.paxserve.serving import Serving, run
from tests.paxserve.several_fronts import SeveralFronts, Streamed, scrape, tokenizer_folder, wait

ADMIN = {"Authorization": "Bearer root"}
STEP = 0.005
COUNTED = (
    "vllm:request_success_total", "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count",
    "vllm:time_to_first_token_seconds_count", "vllm:iteration_tokens_total_count",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def server(folder) -> Iterator[SeveralFronts]:
    """One server for the tests that leave it as it was."""
    with SeveralFronts(folder, step=STEP, admin_api_key=["root"], enable_responses_store=True) as server:
        server.url = server.wait_ready()
        yield server
        server.process.terminate()
        assert server.wait_exit() == 0
        assert "Traceback" not in server.log
        assert "heavy modules: []" in server.log


@pytest.fixture
def each(server) -> Iterator[list[httpx.Client]]:
    """A client at each front."""
    with server.at_each(server.url, headers=ADMIN) as clients:
        yield clients


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def running(http: httpx.Client) -> float:
    return value_of(scrape(http), "vllm:num_requests_running")


def test_both_answer_and_look_alike(server, each):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hello"}]
        answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=8)
        assert answer.choices[0].message.content == SCRIPT[:8]
    first, second = each
    assert first.get("/v1/models").json() == second.get("/v1/models").json()
    one, two = complete(first), complete(second)
    assert one["choices"] == two["choices"]
    assert one["system_fingerprint"] == two["system_fingerprint"]


def test_answers_of_one_name_do_not_mix(each):
    streams = [Streamed(http, max_tokens=120, request_id="mine") for http in each]
    texts = [stream.end() for stream in streams]
    assert texts == [((SCRIPT * 8)[: len(texts[0][0])], "length")] * 2
    assert len(texts[0][0]) > 100


def test_any_front_tells_the_metrics_of_all(each):
    first, second = each
    before = value_of(scrape(first), "vllm:request_success_total", finished_reason="length")
    told = []
    for turn, http in enumerate((first, second, second, first)):
        complete(http, max_tokens=3)
        for name in COUNTED:
            labels = {"finished_reason": "length"} if "success" in name else {}
            seen = [value_of(scrape(each[(turn + later) % 2]), name, **labels) for later in range(3)]
            assert seen == sorted(seen)
            told.append((name, seen[0]))
    counts = [count for name, count in told if name == "vllm:request_success_total"]
    assert counts == [before + 1, before + 2, before + 3, before + 4]
    latencies = [count for name, count in told if "e2e" in name]
    assert latencies == [latencies[0] + place for place in range(4)]


def test_the_metrics_are_those_of_a_server_with_one_front(each):
    async def of_one(served: Serving):
        await served.complete(max_tokens=2)
        return (await served.http.get("/metrics")).text

    def declared(text: str) -> set[str]:
        return set(re.findall(r"^# (?:TYPE|HELP) .*$", text, re.MULTILINE))

    def buckets(text: str) -> set[str]:
        return set(re.findall(r"^(vllm:\w+_bucket\{.*\}) ", text, re.MULTILINE))

    complete(each[0])
    alone, several = run(of_one), scrape(each[1])
    assert declared(several) == declared(alone)
    assert buckets(several) == buckets(alone)
    assert several.count("\nprocess_start_time_seconds ") == 1


def test_counters_never_go_back_while_both_work(each):
    streams = [Streamed(http, max_tokens=150) for http in each]
    seen = []
    with httpx.Client(base_url=each[0].base_url, timeout=10) as anywhere:
        for turn in range(12):
            text = anywhere.get("/metrics", headers={"Connection": "close"}).text
            seen.append(
                [
                    value_of(text, f"vllm:{name}")
                    for name in (
                        "generation_tokens_total",
                        "iteration_tokens_total_sum",
                        "inter_token_latency_seconds_count",
                    )
                ]
            )
            assert value_of(text, "vllm:num_requests_running") <= 2
            time.sleep(0.01 * (turn % 3))
    assert all(
        later >= earlier
        for row, after in zip(seen, seen[1:], strict=False)
        for earlier, later in zip(row, after, strict=True)
    )
    assert seen[0] != seen[-1]
    assert [stream.end()[1] for stream in streams] == ["length"] * 2


def test_a_kept_response_is_found_through_any_front(each):
    first, second = each
    made = first.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 8}).json()
    assert second.get(f"/v1/responses/{made['id']}").json() == made
    follow = second.post(
        "/v1/responses", json={"input": "More", "max_output_tokens": 8, "previous_response_id": made["id"]}
    )
    assert follow.json()["usage"]["input_tokens"] > made["usage"]["input_tokens"] + 8
    assert first.get(f"/v1/responses/{follow.json()['id']}").json() == follow.json()
    assert follow.json()["id"].rpartition("_")[2] != made["id"].rpartition("_")[2]
    for unknown in (
        "resp_0",
        "resp_" + "0" * 32,
        "resp_" + "0" * 32 + "_7",
        "resp_" + "0" * 32 + "_../1",
        made["id"] + "1",
    ):
        for http in each:
            assert http.get(f"/v1/responses/{unknown}").status_code == 404
    refused = second.post(f"/v1/responses/{made['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")
    assert second.get(f"/v1/responses/{made['id']}?stream=true").json()["error"]["param"] == "stream"


def test_a_response_in_the_background_is_followed_and_ended_through_any_front(each):
    first, second = each
    body = {"input": "Hello", "max_output_tokens": 40, "background": True, "stream": True}
    with first.stream("POST", "/v1/responses", json=body) as stream:
        created = next(line for line in stream.iter_lines() if line.startswith("data: "))
        response_id = json.loads(created[6:])["response"]["id"]
        with second.stream("GET", f"/v1/responses/{response_id}?stream=true&starting_after=0") as followed:
            events = [json.loads(line[6:]) for line in followed.iter_lines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "response.completed"
    long = first.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 400, "background": True}).json()
    assert second.get(f"/v1/responses/{long['id']}").json()["status"] in ("queued", "in_progress")
    assert second.post(f"/v1/responses/{long['id']}/cancel").json()["status"] == "cancelled"
    assert first.get(f"/v1/responses/{long['id']}").json()["status"] == "cancelled"
    wait(lambda: running(first) == 0)


def test_who_stops_following_ends_nothing(each):
    first, second = each
    body = {"input": "Hello", "max_output_tokens": 60, "background": True, "stream": True}
    with first.stream("POST", "/v1/responses", json=body) as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        response_id = next(events)["response"]["id"]
        with second.stream("GET", f"/v1/responses/{response_id}?stream=true") as followed:
            next(followed.iter_lines())
        assert list(events)[-1]["type"] == "response.completed"
    assert second.get(f"/v1/responses/{response_id}").json()["status"] in ("completed", "incomplete")


def test_a_client_that_leaves_one_front_ends_only_its_own(server, each):
    first, second = each
    body = {"prompt": "x", "max_tokens": 500, "stream": True}
    with server.at(server.fronts[0], server.url) as leaver:
        stays = Streamed(second, max_tokens=400).begun()
        with leaver.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert running(first) == 2
    wait(lambda: running(first) == 1)
    text, reason = stays.end()
    assert reason == "length"
    assert (SCRIPT * 50).startswith(text.rstrip("\ufffd"))
    assert running(second) == 0


def test_load_is_that_of_all(server, each):
    first, second = each
    with server.at(server.fronts[0], server.url) as one, server.at(server.fronts[1], server.url) as two:
        streams = [Streamed(one, max_tokens=300).begun(), Streamed(two, max_tokens=300).begun()]
        assert [http.get("/load").json() for http in each] == [{"server_load": 2}] * 2
        for stream in streams:
            stream.end()
    wait(lambda: first.get("/load").json() == {"server_load": 0} == second.get("/load").json())


def test_a_pause_holds_at_every_front(server, each):
    first, second = each
    with server.at(server.fronts[1], server.url) as busy:
        cut = Streamed(busy, max_tokens=400).begun()
        assert first.post("/pause").json() == {"status": "paused"}
        assert cut.end()[1] == "abort"
    assert second.get("/is_paused").json() == {"is_paused": True}
    with server.at(server.fronts[0], server.url) as one, server.at(server.fronts[1], server.url) as two:
        held = [Streamed(http, max_tokens=3) for http in (one, two)]
        time.sleep(0.2)
        assert not any(stream.lines for stream in held)
        second.post("/resume")
        assert [stream.end() for stream in held] == [(SCRIPT[:3], "length")] * 2
    assert first.get("/is_paused").json() == {"is_paused": False}


def test_a_pause_waits_for_the_requests_of_every_front_or_keeps_them(server, each):
    first, second = each
    with server.at(server.fronts[1], server.url) as busy:
        kept = Streamed(busy, max_tokens=60).begun()
        first.post("/pause?mode=keep")
        so_far = len(kept.lines)
        time.sleep(0.2)
        assert len(kept.lines) <= so_far + 2
        second.post("/resume")
        assert kept.end()[1] == "length"
        waited = Streamed(busy, max_tokens=60).begun()
        first.post("/pause?mode=wait")
        assert running(first) == 0
        assert waited.end()[1] == "length"
        first.post("/resume")


def test_sleep_and_waking_up_are_the_whole_servers(server, each):
    first, second = each
    with server.at(server.fronts[1], server.url) as busy:
        cut = Streamed(busy, max_tokens=400).begun()
        assert first.post("/sleep").json()["status"] == "sleeping"
        assert cut.end()[1] == "abort"
    assert second.get("/is_sleeping").json() == {"is_sleeping": True}
    assert [value_of(scrape(http), "vllm:engine_sleep_state", sleep_state="weights_offloaded") for http in each] == [
        1,
        1,
    ]
    assert second.post("/sleep").status_code == 409
    for http in each:
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert second.post("/wake_up").json()["status"] == "awake"
    assert first.get("/is_sleeping").json() == {"is_sleeping": False}
    assert complete(first)["choices"][0]["text"] == SCRIPT[:4]


def test_answers_are_ended_by_their_ids_wherever_they_are(server, each):
    first, _ = each
    with server.at(server.fronts[0], server.url) as one, server.at(server.fronts[1], server.url) as two:
        streams = [Streamed(http, max_tokens=500, request_id="both").begun() for http in (one, two)]
        other = Streamed(first, max_tokens=60, request_id="other").begun()
        with server.at(server.fronts[1], server.url, headers=ADMIN) as admin:
            ended = admin.post("/abort_requests", json={"request_ids": ["cmpl-both"]}).json()
            assert ended == {"aborted": 2}
        assert [stream.end()[1] for stream in streams] == ["abort"] * 2
        assert other.end()[1] == "length"


def test_profiles_and_the_prefix_cache_are_the_cores(each):
    first, second = each
    codes = [http.post(path).status_code for http, path in (
        (first, "/stop_profile"), (first, "/start_profile"), (second, "/start_profile"), (second, "/stop_profile")
    )]  # fmt: skip
    assert codes == [409, 200, 409, 200]
    assert second.post("/reset_prefix_cache").json() == {"success": True}
    assert first.get("/server_info").json()["config"]["server"]["api_server_count"] == 2


def test_limits_of_the_queue_hold_for_all_together(folder):
    with SeveralFronts(folder, step=2.0, max_num_queued_reqs=2) as server:
        url = server.wait_ready()
        with (
            server.at_each(url) as (first, second),
            server.at(server.fronts[0], url) as one,
            server.at(server.fronts[1], url) as two,
        ):
            # The first step takes two seconds: until it ends nobody has heard of either.
            streams = [Streamed(first, max_tokens=1), Streamed(second, max_tokens=1)]
            wait(lambda: one.get("/load").json()["server_load"] == 2)
            time.sleep(0.1)
            for http in (one, two):
                refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
                assert "2 of 2 are queued" in refused.json()["error"]["message"]
            assert [stream.end()[1] for stream in streams] == ["length"] * 2
            refusals = [line for line in scrape(one).splitlines() if line.startswith("vllm:admission_rejections_total")]
            assert 'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"} 2.0' in refusals


def test_the_folder_is_private_and_keys_are_on_no_command_line(folder, monkeypatch):
    parent = Path(tempfile.mkdtemp(prefix="pax"))
    monkeypatch.setenv("TMPDIR", str(parent))
    with SeveralFronts(folder, api_key=["very-secret"], admin_api_key=["more-secret"]) as server:
        server.wait_ready()
        (place,) = parent.iterdir()
        assert place.stat().st_mode & 0o777 == 0o700
        names = {path.name for path in place.iterdir()}
        assert names >= {"board", "requests", "outputs", "outputs-1", "outputs-2", "peer-1", "peer-2"}
        assert {(place / f"peer-{front}").stat().st_mode & 0o777 for front in (1, 2)} == {0o600}
        assert (place / "board").stat().st_mode & 0o777 == 0o600
        told = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.core_pids()]
        told += [path.read_bytes() for path in place.iterdir() if path.is_file()]
        assert len(told) >= 6
        assert not any(b"secret" in text for text in told)
        server.process.terminate()
        assert server.wait_exit() == 0
    assert not list(parent.iterdir())
    parent.rmdir()
