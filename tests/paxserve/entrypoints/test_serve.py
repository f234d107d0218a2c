"""The server as a process of its own, with a scripted core in another."""

import json
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from paxserve.config import EngineConfig, ModelConfig
from paxserve.entrypoints.listener import listen
from paxserve.entrypoints.serve import run_server
from paxserve.entrypoints.server import read_chat_template
from paxserve.errors import ConfigError
from paxserve.server_config import ServerConfig
from tests.paxserve.fake_core import CRASH, SCRIPT, VANISH
from tests.paxserve.running_server import RunningServer, wait_gone
from tests.small_tokenizers import CHATML, byte_level_tokenizer

GOLDENS = Path(__file__).parents[2] / "goldens"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint folder with a tokenizer and nothing else: the scripted core needs no weights."""
    path = tmp_path_factory.mktemp("checkpoint")
    byte_level_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def url(folder) -> Iterator[str]:
    """One server for the tests that leave it as it was."""
    with RunningServer(folder, api_key=["secret"]) as server:
        yield server.wait_ready()
        server.process.terminate()
        assert server.wait_exit() == 0
        assert "heavy modules: []" in server.log


def test_the_openai_client_works_unchanged(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        messages = [{"role": "user", "content": "Hello"}]
        answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=8, seed=1, user="me")
        assert answer.choices[0].message.content == SCRIPT[:8]
        assert answer.usage.completion_tokens == 8
        chunks = list(
            client.chat.completions.create(
                model="fake",
                messages=messages,
                max_tokens=60,
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,
                top_logprobs=2,
                extra_body={"min_p": 0.1, "ignore_eos": True},
            )  # fmt: skip
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text.startswith(SCRIPT + SCRIPT)
        assert chunks[-1].usage.completion_tokens == 60
        completion = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=4, logprobs=1)
        assert [choice.text for choice in completion.choices] == [SCRIPT[:4]] * 2
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="fake", messages=messages, temperature=9)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_the_stream_helper_of_the_openai_client_works(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hello"}]
        with client.chat.completions.stream(model="fake", messages=messages, stop=["three"]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == "One two "


def test_many_clients_at_once_and_some_leave(url):
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "Hello", "max_tokens": 400, "stream": True}
    with httpx.Client(base_url=url, headers=headers, timeout=20) as http:
        for _ in range(5):
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**body, "stream": False, "n": 4}, timeout=0.05)
        deadline = time.monotonic() + 5
        while 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' not in http.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_sigterm_lets_running_requests_finish(folder):
    with RunningServer(folder, step=0.02) as server:
        url = server.wait_ready()
        core = server.core_pids()
        with httpx.Client(timeout=20) as http:
            body = {"prompt": "Hello", "max_tokens": 60, "stream": True}
            with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.terminate()
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.wait_exit() == 0
        assert "Told to stop: 1 requests may finish" in server.log
        wait_gone(core)


def test_shutdown_timeout_bounds_the_wait(folder):
    with RunningServer(folder, step=0.2, shutdown_timeout=1) as server:
        url = server.wait_ready()
        with httpx.Client(timeout=20) as http:
            body = {"prompt": "Hello", "max_tokens": 400, "stream": True}
            with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                started = time.monotonic()
                server.process.terminate()
                assert server.wait_exit() == 0
        assert time.monotonic() - started < 5


def test_while_it_drains_it_is_not_ready_and_takes_nothing_new(folder):
    with RunningServer(folder, step=0.05) as server:
        url = server.wait_ready()
        with httpx.Client(timeout=20) as http:
            body = {"prompt": "Hello", "max_tokens": 30, "stream": True}
            with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                next(lines := response.iter_lines())
                server.process.terminate()
                time.sleep(0.3)
                with httpx.Client(timeout=20) as other:
                    assert other.get(f"{url}/health").status_code == 503
                    refused = other.post(f"{url}/v1/completions", json={"prompt": "Hi"})
                    assert refused.status_code == 503
                    assert refused.headers["retry-after"]
                assert list(lines)[-2] == "data: [DONE]"
        assert server.wait_exit() == 0


def test_every_line_of_the_log_can_be_json(folder):
    with RunningServer(folder, log_format="json") as server:
        url = server.wait_ready()
        assert httpx.get(f"{url}/version", headers={"X-Request-Id": "trace-1"}, timeout=5).status_code == 200
        server.process.terminate()
        assert server.wait_exit() == 0
    entries = [json.loads(line) for line in server.log.splitlines() if not line.startswith("heavy modules")]
    assert {"paxserve.entrypoints.access_log", "uvicorn.error"} <= {entry["logger"] for entry in entries}
    assert [entry["path"] for entry in entries if entry.get("request_id") == "trace-1"] == ["/version"]


def test_over_tls(folder):
    tls = GOLDENS / "tls"
    files = {"ssl_keyfile": str(tls / "key.pem"), "ssl_certfile": str(tls / "cert.pem")}
    with RunningServer(folder, **files) as server:
        url = server.wait_ready(verify=str(tls / "cert.pem"))
        assert url.startswith("https://127.0.0.1:")
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")


def test_on_a_unix_socket(folder):
    with tempfile.TemporaryDirectory(prefix="pax") as place:
        path = str(Path(place, "socket"))
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(path)
        with RunningServer(folder, uds=path) as server:
            server.wait_ready(uds=path)
            assert Path(path).stat().st_mode & 0o777 == 0o600
            with RunningServer(folder, uds=path) as second:
                assert second.wait_exit() == 1
                assert f"Cannot listen on {path}" in second.log


def test_a_second_signal_insists(folder):
    with RunningServer(folder, step=0.2) as server:
        url = server.wait_ready()
        with httpx.Client(timeout=20) as http:
            body = {"prompt": "Hello", "max_tokens": 400, "stream": True}
            with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                started = time.monotonic()
                server.process.send_signal(signal.SIGINT)
                time.sleep(0.3)
                server.process.send_signal(signal.SIGINT)
                assert server.wait_exit() == 0
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(("text", "reason"), [(CRASH, "the device is on fire"), (VANISH, "ended with status 3")])
def test_when_the_core_dies_the_server_says_so_and_ends(folder, text, reason):
    with RunningServer(folder, step=0.02) as server:
        url = server.wait_ready()
        with httpx.Client(timeout=20) as http:
            body = {"prompt": "x", "max_tokens": 400, "stream": True}
            other = http.send(http.build_request("POST", f"{url}/v1/completions", json=body), stream=True)
            next(lines := other.iter_lines())
            died = http.post(f"{url}/v1/completions", json={"prompt": text})
            assert died.status_code == 500
            assert reason in died.json()["error"]["message"]
            assert http.get(f"{url}/health").status_code == 503
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert reason in json.loads(rest[-2][6:])["error"]["message"]
            other.close()
        assert server.wait_exit() == 1
        assert reason in server.log


def test_killing_the_server_takes_the_core_with_it(folder, monkeypatch):
    folder_of_sockets = Path(tempfile.mkdtemp(prefix="pax"))
    monkeypatch.setenv("TMPDIR", str(folder_of_sockets))
    with RunningServer(folder) as server:
        server.wait_ready()
        core = server.core_pids()
        assert len(core) == 1
        assert list(folder_of_sockets.iterdir())
        server.process.kill()
        wait_gone(core)
        assert not list(folder_of_sockets.iterdir())


@pytest.mark.parametrize("delay", [0.1, 2.0])
def test_stopping_during_the_start_is_no_failure(folder, delay):
    with RunningServer(folder, core="tests.paxserve.slow_core:SlowCore") as server:
        deadline = time.monotonic() + 10
        while not (core := server.core_pids()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(delay)  # while FastAPI is being loaded, and when only the core is still busy
        server.process.terminate()
        assert server.wait_exit() == 0
        wait_gone(core)


@pytest.mark.parametrize(
    ("name", "words"),
    [("broken", "The checkpoint is broken: expected a model"), ("buggy", "ZeroDivisionError: a bug in the engine")],
)
def test_a_failed_start_is_one_clear_line(tmp_path, folder, name, words):
    model = tmp_path / name
    model.symlink_to(folder)
    with RunningServer(model) as server:
        assert server.wait_exit() == 1
        line = next(line for line in server.log.splitlines() if line.startswith("paxserve: "))
        assert words in line


def test_a_missing_model_is_one_clear_line(tmp_path):
    with RunningServer(tmp_path / "nowhere") as server:
        assert server.wait_exit() == 1
        assert server.log.count("\n") <= 3
        assert "nowhere" in server.log


def test_while_the_model_loads_health_is_503_and_the_port_is_taken(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with RunningServer(folder, core="tests.paxserve.slow_core:SlowCore", port=port) as server:
        deadline = time.monotonic() + 10
        while not server.core_pids():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for path in ("health", "v1/models"):
            answer = httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=5)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "The server is starting: the model is not loaded yet."
        with RunningServer(folder, port=port) as second:
            assert second.wait_exit() == 1
            assert f"paxserve: Cannot listen on 127.0.0.1:{port}" in second.log
            assert "in use" in second.log


def test_a_taken_port_is_found_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="Cannot listen on 127.0.0.1:.*in use"):
            run_server(EngineConfig(model=ModelConfig(model="nothing")), config, core="no.such:Core")


def test_an_address_that_is_none():
    with pytest.raises(ConfigError, match="no address"):
        listen(ServerConfig(host="no such host", port=0))


def test_chat_templates_from_text_or_file(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template("{{ x }}") == "{{ x }}"
    assert read_chat_template(str(tmp_path / "chat.jinja")) == "{{ messages }}"
    with pytest.raises(ConfigError, match="chat_template must be"):
        read_chat_template(str(tmp_path / "nothing.jinja"))
