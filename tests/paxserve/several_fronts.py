"""A running server with several front processes, and clients of which it is known which front they have reached."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.paxserve.running_server import RunningServer
from tests.small_tokenizers import CHATML, byte_level_tokenizer

LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=60)


class SeveralFronts(RunningServer):
    """The server of `RunningServer` with two fronts, unless told otherwise."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, **{"api_server_count": 2, "timeout_keep_alive": 60, **options})

    def pids(self, module: str) -> list[int]:
        """The processes of the server that run a module."""
        return [pid for pid in self.core_pids() if module in Path(f"/proc/{pid}/cmdline").read_text()]

    @property
    def fronts(self) -> list[int]:
        """The front processes, oldest first."""
        return self.pids("front_process")

    @contextmanager
    def at(self, front: int, url: str, **options: Any) -> Iterator[httpx.Client]:
        """A client with one connection, to this process: the others stand still while it is made."""
        with httpx.Client(base_url=url, limits=LIMITS, timeout=20, **options) as http:
            others = [pid for pid in self.fronts if pid != front]
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
            try:
                http.get("/version")
            finally:
                for pid in others:
                    os.kill(pid, signal.SIGCONT)
            yield http

    @contextmanager
    def at_each(self, url: str, **options: Any) -> Iterator[list[httpx.Client]]:
        """A client at each of the two fronts."""
        first, second = self.fronts
        with self.at(first, url, **options) as one, self.at(second, url, **options) as two:
            yield [one, two]


class Streamed:
    """A completion that is streamed while the test does something else."""

    def __init__(self, http: httpx.Client, path: str = "/v1/completions", **body: Any) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.status = 0
        self._thread = threading.Thread(
            target=self._run, args=(http, path, {"prompt": "Hello", "stream": True, **body})
        )
        self._thread.start()

    def _run(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        try:
            with http.stream("POST", path, json=body) as answer:
                self.status = answer.status_code
                self.lines += (line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.error = error

    def begun(self) -> "Streamed":
        """Return when something has come."""
        wait(lambda: self.lines or not self._thread.is_alive())
        return self

    def join(self) -> None:
        """Return when it has ended in whatever way."""
        self._thread.join(20)
        assert not self._thread.is_alive()

    def end(self) -> tuple[str, str | None]:
        """The text and the finish_reason."""
        self.join()
        choices = [json.loads(line[6:])["choices"][0] for line in self.lines if line.startswith("data: {")]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"] if choices else None


def wait(condition: Callable[[], object], seconds: float = 10) -> None:
    """Return when it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def scrape(http: httpx.Client) -> str:
    """The metrics."""
    return http.get("/metrics").text


def tokenizer_folder(path: Path) -> Path:
    """A checkpoint folder with a tokenizer and nothing else: the scripted core needs no weights."""
    byte_level_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
