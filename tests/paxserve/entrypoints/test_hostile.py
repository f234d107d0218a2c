"""Clients that mean no good: afterwards requests, connections and memory are back to where they were."""

import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.paxserve.running_server import RunningServer
from tests.small_tokenizers import CHATML, byte_level_tokenizer

BODY = json.dumps({"prompt": "Hello", "max_tokens": 400, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("checkpoint")
    byte_level_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    limits = {"request_body_timeout": 1.0, "disable_uvicorn_access_log": True}
    with RunningServer(path, step=0.005, **limits) as running:
        running.url = running.wait_ready()  # type: ignore[attr-defined]
        yield running


class Books:
    """What the server holds, all processes of it together."""

    def __init__(self, server: RunningServer) -> None:
        text = httpx.get(f"{server.url}/metrics", timeout=20).text  # type: ignore[attr-defined]
        gauges = re.findall(
            r"^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc){.*} (\S+)", text, re.M
        )
        self.num_requests = sum(map(float, gauges))
        processes = [Path(f"/proc/{pid}") for pid in (server.process.pid, *server.core_pids())]
        self.num_files = sum(len(os.listdir(process / "fd")) for process in processes)
        statuses = [(process / "status").read_text() for process in processes]
        self.kilobytes = sum(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) for status in statuses)


def check_after(server: RunningServer, before: Books, *, megabytes: int = 30) -> None:
    deadline = time.monotonic() + 20
    while True:
        after = Books(server)
        if after.num_requests == 0 and after.num_files <= before.num_files + 2:
            break
        assert time.monotonic() < deadline, vars(after)
        time.sleep(0.1)
    assert after.kilobytes < before.kilobytes + 1024 * megabytes
    url = server.url  # type: ignore[attr-defined]
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=20).status_code == 200


def connect(server: RunningServer) -> socket.socket:
    address = urlsplit(server.url)  # type: ignore[attr-defined]
    return socket.create_connection((address.hostname, address.port), timeout=10)


def reset(connection: socket.socket) -> None:
    """Close with a reset, as a killed client does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_connections_that_are_opened_and_dropped(server, count):
    before = Books(server)
    for number in range(count):
        connection = connect(server)
        if number % 3 == 1:
            connection.sendall(WHOLE[: number % len(WHOLE)])
        elif number % 3 == 2:
            connection.sendall(WHOLE)
        reset(connection)
    check_after(server, before)


def test_streams_that_are_left_in_the_middle(server):
    before = Books(server)
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(40)]
        for connection in connections:
            connection.sendall(WHOLE)
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        for number, connection in enumerate(connections):
            if number % 2:
                reset(connection)
            else:
                connection.shutdown(socket.SHUT_WR)  # half open: a client that only says that it sends no more
    check_after(server, before)


def test_bodies_that_never_come_and_readers_that_do_not_read(server):
    before = Books(server)
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(30)]
        for number, connection in enumerate(idle):
            connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{" if number % 2 else WHOLE)
        for connection in idle[1::2]:
            assert b" 408 " in connection.recv(200)
    check_after(server, before)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 400_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Y: z\r\n" * 400 + b"\r\n",
        HEAD + b"Content-Length: 99999999999\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\nhello", b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 1000,
        b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=range(10),
)  # fmt: skip
def test_requests_that_are_none(server, raw):
    before = Books(server)
    with connect(server) as connection:
        try:
            connection.sendall(raw)
            connection.settimeout(3)
            answer = connection.recv(200)
        except (ConnectionError, TimeoutError):
            answer = b""
    assert not answer or answer.split(b" ")[1] in (b"400", b"413", b"431", b"505", b"404", b"408"), answer
    check_after(server, before)
