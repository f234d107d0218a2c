"""How long a server takes from its launch to its first token, and how much memory that takes."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from paxserve.bench.process_memory import peak_bytes
from paxserve.client import client_options, error_text
from paxserve.config import environment_api_key
from paxserve.errors import ConfigError

POLL_SECONDS = 0.02


def measure_startup(model: str, serve_arguments: Sequence[str], *, is_cold: bool, timeout: float) -> dict[str, Any]:
    """Seconds from launch until `/health` answers and until the first token, and the peak memory in bytes.

    A cold start compiles everything anew: its cache of compiled programs is an empty folder. Raises `ConfigError`
    when the server ends, refuses the request, or takes longer than `timeout`.
    """
    with contextlib.ExitStack() as stack:
        more = []
        if is_cold:
            more = [
                "--compilation-cache-dir",
                stack.enter_context(tempfile.TemporaryDirectory(prefix="paxserve-cold-")),
            ]
        root = f"http://127.0.0.1:{free_port()}"
        more += ["--uvicorn-log-level", "warning"]
        command = [sys.executable, "-m", "paxserve", "serve", model, *serve_arguments, *more]
        begin = time.perf_counter()
        process = stack.enter_context(running([*command, "--host", "127.0.0.1", "--port", root.rpartition(":")[2]]))
        client = stack.enter_context(httpx.Client(**client_options(root, _api_key(serve_arguments))))
        wait_healthy(process, client, f"{root}/health", begin + timeout)
        ready = time.perf_counter() - begin
        body = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
        response = client.post(f"{root}/v1/completions", json=body | {"model": first_model(client, root)})
        first_token = time.perf_counter() - begin
        if response.status_code != httpx.codes.OK:
            raise ConfigError(f"The server refused the first request: {error_text(response.content)}")
        memory = peak_bytes(process.pid)
    return {"is_cold": is_cold, "seconds_to_ready": ready, "seconds_to_first_token": first_token, "peak_bytes": memory}


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The process while the block runs; then SIGTERM, and SIGKILL if that does not end it."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_healthy(process: subprocess.Popen[bytes], client: httpx.Client, url: str, deadline: float) -> None:
    """Return once `url` answers. Raises `ConfigError` when the server ends, or is not ready by `deadline`."""
    while True:
        if process.poll() is not None:
            raise ConfigError(f"The server ended with status {process.returncode} before it was ready.")
        if time.perf_counter() > deadline:
            raise ConfigError("The server was not ready in time; --timeout allows it more.")
        with contextlib.suppress(httpx.TransportError):
            if client.get(url).status_code == httpx.codes.OK:
                return
        time.sleep(POLL_SECONDS)


def first_model(client: httpx.Client, root: str) -> str:
    """The first name in the server's list of models."""
    return client.get(f"{root}/v1/models").json()["data"][0]["id"]


def _api_key(serve_arguments: Sequence[str]) -> str | None:
    """The key that the server's own arguments or environment set."""
    if "--api-key" in serve_arguments[:-1]:
        return serve_arguments[serve_arguments.index("--api-key") + 1]
    return environment_api_key()
