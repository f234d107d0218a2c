"""The main job on real input: the demo model, a real server, OpenAI's client, and our own clients."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from paxserve import cli
from paxserve.bench.startup import free_port

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
START_SECONDS = 600
"""Far more than a start takes: the machine may be busy, and the model may have to be fetched."""


@pytest.fixture(scope="module")
def server():
    """The address and the process of a server with the demo model."""
    port = free_port()
    command = [sys.executable, "-m", "paxserve", "serve", MODEL, "--port", str(port)]
    # The tests' eight simulated devices are not what a user's server has.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.Popen(command, env=environment)
    root, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server was not ready in time"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{root}/health", timeout=5, trust_env=False).status_code == 200:
                break
        time.sleep(0.1)
    yield root, process
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.fixture
def client(server):
    root, _ = server
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(base_url=f"{root}/v1", api_key="none", http_client=http) as it,
    ):
        yield it


def test_openais_client_gets_a_sane_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_brings_the_same_text(client):
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert len(chunks) > 3
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_nothing_compiles_after_the_start_and_no_page_is_lost(client, server):
    root, _ = server
    text = httpx.get(f"{root}/metrics", trust_env=False).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    by_name = {name.partition("{")[0]: float(value) for name, value in values.items()}
    assert by_name["paxserve:recompilations_total"] == 0
    assert by_name["vllm:num_requests_running"] == 0
    assert by_name["vllm:kv_cache_usage_perc"] == 0


def test_the_workload_tool_measures_it(server, capsys):
    root, process = server
    assert cli.main(["bench", "workload", "W2", "--base-url", root, "--server-pid", str(process.pid)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["completed"], figures["failed"], figures["output_tokens"]) == (1, 0, 128)
    assert 0 < figures["median_ttft_ms"] < 1000 * figures["duration_s"]
    assert figures["peak_memory_gib"] > 0.5  # the weights in float32 alone


def test_the_terminal_talks_to_it(server, monkeypatch, capsys):
    root, _ = server
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION[0]["content"] + "\n/exit\n"))
    assert cli.main(["chat", "--url", root, "--temperature", "0", "--max-tokens", "32"]) == 0
    assert "Paris" in capsys.readouterr().out
