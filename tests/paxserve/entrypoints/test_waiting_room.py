import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from paxserve.entrypoints.listener import listen
from paxserve.entrypoints.waiting_room import WaitingRoom
from paxserve.errors import ConfigError
from paxserve.server_config import ServerConfig


@pytest.fixture
def listener():
    with listen(ServerConfig(port=0)) as listener:
        yield listener


def test_requests_before_the_model_is_there_are_told_so(listener):
    room = WaitingRoom(listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
    for data in (None, b'{"prompt": "x"}'):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, data, timeout=5)
        with refused.value as answer:
            assert answer.code == 503
            assert answer.headers["Retry-After"] == "2"
            assert json.load(answer)["error"]["type"] == "ServiceUnavailableError"
    room.close()
    room.close()


def test_silent_clients_do_not_hold_it_up_for_long(listener):
    room = WaitingRoom(listener)
    address = listener.getsockname()
    silent = [socket.create_connection(address) for _ in range(2)]
    started = time.monotonic()
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 503 ")
    assert time.monotonic() - started < 4
    room.close()
    for client in silent:
        client.close()


def test_who_comes_after_it_has_closed_waits_for_the_server(listener):
    room = WaitingRoom(listener)
    room.close()
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        listener.setblocking(True)
        accepted, _ = listener.accept()
        accepted.close()
        assert client.recv(10) == b""


def test_with_tls_nothing_is_said_in_the_clear(listener):
    room = WaitingRoom(listener, is_secret=True)
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        assert client.recv(10) == b""
    room.close()


def test_a_second_server_on_the_port_fails_at_once(listener):
    port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=f"Cannot listen on 127.0.0.1:{port}: .* in use. Choose another --port"):
        listen(ServerConfig(port=port))


def test_a_port_that_was_in_use_a_moment_ago_is_free_again(listener):
    port = listener.getsockname()[1]
    with socket.create_connection(listener.getsockname()) as client:
        accepted = listener.accept()[0]
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.recv(1)
    listener.close()
    listen(ServerConfig(port=port)).close()
    assert threading.active_count() < 50
