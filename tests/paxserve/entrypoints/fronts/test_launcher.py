"""The life and death of several front processes around one core."""

import json
import os
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.paxserve.entrypoints.test_app import value_of
from tests.paxserve.fake_core import CRASH, SCRIPT, VANISH
from tests.paxserve.running_server import wait_gone
from tests.paxserve.several_fronts import SeveralFronts, Streamed, scrape, tokenizer_folder, wait

TLS = Path(__file__).parents[3] / "goldens" / "tls"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("checkpoint"))


def test_a_front_that_is_killed_takes_nothing_with_it_but_its_own(folder):
    with SeveralFronts(folder, step=0.01) as server:
        url = server.wait_ready()
        killed, lives = server.fronts
        with server.at(killed, url) as one, server.at(lives, url) as two, server.at(lives, url) as observer:
            counted = [Streamed(http, max_tokens=2).end()[1] for http in (one, two)]
            open_files = files(scrape(observer))
            before = value_of(scrape(observer), "vllm:request_success_total", finished_reason="length")
            lost, kept = Streamed(one, max_tokens=500).begun(), Streamed(two, max_tokens=400).begun()
            os.kill(killed, signal.SIGKILL)
            wait(lambda: value_of(scrape(observer), "vllm:num_requests_running") == 1, 3)
            text, reason = kept.end()
            lost.join()
        assert counted == ["length"] * 2
        assert before == 2
        assert (reason, len(text) > 150, (SCRIPT * 50).startswith(text.rstrip("\ufffd"))) == ("length", True, True)
        assert isinstance(lost.error, httpx.TransportError)  # not an end that looks like a good one
        assert lost.lines[-1] != "data: [DONE]"
        wait(lambda: len(server.fronts) == 2)
        with server.at_each(url) as (first, second):
            for http in (first, second):
                assert Streamed(http, max_tokens=3).end() == (SCRIPT[:3], "length")
            texts = [scrape(first), scrape(second)]
        for text in texts:
            assert value_of(text, "vllm:request_success_total", finished_reason="length") == before + 3
            assert value_of(text, "vllm:num_requests_running") == 0
            assert files(text) == open_files  # those of the dead are not counted
        server.process.terminate()
        assert server.wait_exit() == 0
    assert "Front process 1 was killed by signal 9" in server.log
    assert re.search(r"Front process 3 serves in its place", server.log)


def files(text: str) -> str:
    """How many files the server may open."""
    (line,) = re.findall("^process_max_fds .*$", text, re.MULTILINE)
    return line


def test_a_front_that_takes_the_place_of_another_knows_how_the_server_stands(folder):
    admin = {"Authorization": "Bearer root"}
    with SeveralFronts(folder, admin_api_key=["root"], enable_responses_store=True) as server:
        url = server.wait_ready()
        killed, lives = server.fronts
        with server.at(lives, url, headers=admin) as stays:
            with server.at(killed, url, headers=admin) as goes:
                made = goes.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2}).json()
                long = {"input": "Hello", "max_output_tokens": 400, "background": True, "stream": True}
                with goes.stream("POST", "/v1/responses", json=long) as stream:
                    created = next(line for line in stream.iter_lines() if line.startswith("data: "))
                followed = json.loads(created[6:])["response"]["id"]
            with server.at(killed, url, headers=admin) as goes, server.at(lives, url, headers=admin) as follower:
                models = goes.get("/v1/models").json()
                with follower.stream("GET", f"/v1/responses/{followed}?stream=true") as stream:
                    lines = stream.iter_lines()
                    next(lines)
                    assert goes.post("/sleep?level=0&mode=keep").status_code == 200
                    os.kill(killed, signal.SIGKILL)
                    last = [line for line in lines if line.startswith("data: ")][-1]
                    assert "has ended" in json.loads(last[6:])["message"]
                assert follower.post("/sleep").status_code == 200
            wait(lambda: stays.get(f"/v1/responses/{made['id']}").status_code == 404)
            wait(lambda: len(server.fronts) == 2 and "3" in peers(server))
            with server.at(server.fronts[1], url, headers=admin) as new:
                assert new.get("/is_sleeping").json() == {"is_sleeping": True}
                assert value_of(scrape(new), "vllm:engine_sleep_state", sleep_state="weights_offloaded") == 1
                assert new.post("/v1/completions", json={"prompt": "x"}).status_code == 503
                assert new.post("/wake_up").status_code == 200
                assert new.get("/v1/models").json() == models
                assert new.get(f"/v1/responses/{made['id']}").status_code == 404
            assert Streamed(stays, max_tokens=3).end() == (SCRIPT[:3], "length")


def peers(server: SeveralFronts) -> set[str]:
    """Numbers of the fronts that answer others, from their sockets."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = [line.rpartition("/peer-")[2] for line in lines if "/peer-" in line]
    return set(names)


def test_sigterm_lets_the_requests_of_every_front_finish(folder):
    with SeveralFronts(folder, step=0.02) as server:
        url = server.wait_ready()
        everybody = server.core_pids()
        with server.at_each(url) as (one, two), server.at_each(url) as observers:
            streams = [Streamed(one, max_tokens=120).begun(), Streamed(two, max_tokens=150).begun()]
            # As a service manager does it: all processes at once.
            for pid in (*server.fronts, *server.pids("core_process"), server.process.pid):
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)
            for http in observers:
                assert http.get("/health").status_code == 503
                refused = http.post("/v1/completions", json={"prompt": "Hi"})
                assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert [stream.end()[1] for stream in streams] == ["length", "length"]
            assert all(stream.lines[-1] == "data: [DONE]" for stream in streams)
        assert server.wait_exit() == 0
        wait_gone(everybody)
        assert "Told to stop" in server.log


@pytest.mark.slow
def test_a_deadline_or_a_second_signal_ends_what_still_runs(folder):
    for timeout, signals in ((1, 1), (30, 2)):
        with SeveralFronts(folder, step=0.1, shutdown_timeout=timeout) as server:
            url = server.wait_ready()
            with server.at_each(url) as (one, two):
                streams = [Streamed(http, max_tokens=400).begun() for http in (one, two)]
                started = time.monotonic()
                for _ in range(signals):
                    server.process.send_signal(signal.SIGINT)
                    time.sleep(0.3)
                assert server.wait_exit() == 0
                assert time.monotonic() - started < 6
                for stream in streams:
                    stream.join()


@pytest.mark.parametrize(
    ("text", "reason"),
    [(CRASH, "the device is on fire"), pytest.param(VANISH, "ended with status 3", marks=pytest.mark.slow)],
)
def test_when_the_core_dies_every_front_says_so_and_all_end(folder, text, reason):
    with SeveralFronts(folder, step=0.02) as server:
        url = server.wait_ready()
        everybody = server.core_pids()
        with server.at_each(url) as (one, two), server.at(server.fronts[1], url) as observer:
            other = Streamed(two, max_tokens=400).begun()
            died = one.post("/v1/completions", json={"prompt": text})
            assert died.status_code == 500
            assert reason in died.json()["error"]["message"]
            assert observer.get("/health").status_code == 503
            wait(lambda: other.lines[-1] == "data: [DONE]")
            assert reason in json.loads(other.lines[-2][6:])["error"]["message"]
        assert server.wait_exit() == 1
        assert reason in server.log
        assert "replaced" not in server.log
        wait_gone(everybody)


def test_killing_the_launcher_takes_everything_with_it(folder, monkeypatch):
    parent = Path(tempfile.mkdtemp(prefix="pax"))
    monkeypatch.setenv("TMPDIR", str(parent))
    with SeveralFronts(folder) as server:
        server.wait_ready()
        everybody = server.core_pids()
        assert len(everybody) == 3
        server.process.kill()
        wait_gone(everybody)
        assert not list(parent.iterdir())


@pytest.mark.parametrize("delay", [pytest.param(0.1, marks=pytest.mark.slow), 2.0])
def test_stopping_during_the_start_is_no_failure(folder, delay):
    with SeveralFronts(folder, core="tests.paxserve.slow_core:SlowCore") as server:
        wait(server.core_pids)
        time.sleep(delay)
        everybody = server.core_pids()
        server.process.terminate()
        assert server.wait_exit() == 0
        wait_gone(everybody)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "The checkpoint is broken: expected a model"),
        pytest.param("buggy", "ZeroDivisionError: a bug in the engine", marks=pytest.mark.slow),
        pytest.param("nowhere", "nowhere", marks=pytest.mark.slow),
    ],
)
def test_a_failed_start_is_one_clear_line(tmp_path, folder, name, words):
    model = tmp_path / name
    if name != "nowhere":
        model.symlink_to(folder)
    with SeveralFronts(model) as server:
        assert server.wait_exit() == 1
        lines = [line for line in server.log.splitlines() if line.startswith("paxserve: ")]
        assert len(lines) == 1
        assert words in lines[0]


@pytest.mark.parametrize("delay", [0.0, 0.6])
def test_a_front_that_dies_before_it_serves_ends_the_server(folder, delay):
    with SeveralFronts(folder, core="tests.paxserve.slow_core:SlowCore") as server:
        wait(lambda: len(server.fronts) == 2)
        time.sleep(delay)  # before it has heard its order, and after
        everybody = server.core_pids()
        os.kill(server.fronts[1], signal.SIGKILL)
        assert server.wait_exit() == 1
        assert "paxserve: A front process was killed by signal 9 (out of memory?) while it started." in server.log
        wait_gone(everybody)


@pytest.mark.slow
def test_while_the_model_loads_health_is_503_and_the_port_is_taken(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with SeveralFronts(folder, core="tests.paxserve.slow_core:SlowCore", port=port) as server:
        wait(lambda: len(server.fronts) == 2)
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "The server is starting: the model is not loaded yet."
        with SeveralFronts(folder, port=port) as second:
            assert second.wait_exit() == 1
            assert f"paxserve: Cannot listen on 127.0.0.1:{port}" in second.log


@pytest.mark.slow
def test_over_tls_with_a_log_of_json_lines(folder):
    files = {"ssl_keyfile": str(TLS / "key.pem"), "ssl_certfile": str(TLS / "cert.pem")}
    with SeveralFronts(folder, log_format="json", **files) as server:
        url = server.wait_ready(verify=str(TLS / "cert.pem"))
        assert url.startswith("https://127.0.0.1:")
        server.process.terminate()
        assert server.wait_exit() == 0
    entries = [json.loads(line) for line in server.log.splitlines() if not line.startswith("heavy modules")]
    assert {"paxserve.entrypoints.access_log", "paxserve.entrypoints.fronts.launcher"} <= {
        entry["logger"] for entry in entries
    }


@pytest.mark.slow
def test_on_a_unix_socket(folder):
    with tempfile.TemporaryDirectory(prefix="pax") as place:
        path = str(Path(place, "socket"))
        with SeveralFronts(folder, uds=path) as server:
            server.wait_ready(uds=path)
            assert Path(path).stat().st_mode & 0o777 == 0o600
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://socket") as http:
                for _ in range(4):
                    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
                    assert answer.json()["choices"][0]["text"] == SCRIPT[:3]


@pytest.mark.slow
@pytest.mark.e2e
def test_what_a_killed_front_held_in_the_real_engine_is_free(tmp_path):
    golden = Path(__file__).parents[3] / "goldens" / "llama"
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(golden / name)
    engine = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 128, "compile_sizes": [16]}
    core = "tests.paxserve.checked_core:CheckedCore"
    with SeveralFronts(tokenizer_folder(tmp_path), core=core, engine=engine) as server:
        url = server.wait_ready()
        killed, lives = server.fronts
        body = {"max_tokens": 250, "temperature": 0, "ignore_eos": True}
        with server.at(lives, url) as two, server.at(lives, url) as observer:
            alone = Streamed(two, **body).end()
            with server.at(killed, url) as one:
                lost, kept = Streamed(one, n=3, **body | {"max_tokens": 400}).begun(), Streamed(two, **body).begun()
                os.kill(killed, signal.SIGKILL)
                assert kept.end() == alone
                lost.join()
            wait(lambda: value_of(scrape(observer), "vllm:num_requests_running") == 0)
            assert value_of(scrape(observer), "paxserve:pages_in_use") == 0
            assert Streamed(two, **body).end() == alone
        server.process.terminate()
        assert server.wait_exit() == 0
