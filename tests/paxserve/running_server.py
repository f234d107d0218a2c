"""A server as a process of its own, for tests that need signals, real sockets or a real engine."""

import json
import os
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PROGRAM = """
import asyncio, json, signal, sys
from paxserve.config import EngineConfig
from paxserve.server_config import ServerConfig
from paxserve.entrypoints.serve import run_server
from paxserve.errors import PaxserveError
engine, server = json.loads(sys.argv[1])
signal.signal(signal.SIGUSR2, lambda *_: print("tasks:", len(asyncio.all_tasks()), flush=True))
try:
    status = run_server(EngineConfig.from_flags(**engine), ServerConfig(**server), core=sys.argv[2])
except PaxserveError as error:
    status = f"paxserve: {error}"
print("heavy modules:", sorted({"jax", "flax", "torch", "transformers"} & set(sys.modules)), flush=True)
sys.exit(status)
"""


NUM_FRONTS = int(os.environ.get("PAXSERVE_TEST_FRONTS", "1"))
"""Front processes of servers whose tests do not say how many."""


class RunningServer:
    """A server process; leaving the block kills it and checks that nothing of it is left."""

    def __init__(
        self,
        model: Path,
        *,
        core: str = "tests.paxserve.fake_core:FakeCore",
        step: float = 0.001,
        engine: dict[str, Any] | None = None,
        **server: Any,
    ) -> None:
        flags = {"model": str(model), **(engine or {})}
        settings = {"port": 0, "served_model_name": ["fake"], "api_server_count": NUM_FRONTS, **server}
        arguments = json.dumps([flags, settings])
        self.log = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, arguments, core],
            env={**os.environ, "FAKE_CORE_STEP_SECONDS": str(step), "FAKE_CORE_START_SECONDS": "0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(self, *details: object) -> None:
        core = self.core_pids()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        wait_gone(core)

    def wait_ready(self, *, uds: str | None = None, verify: str | bool = True) -> str:
        """The address, once it answers."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line
            if found := re.search(r"Serving fake.* on ((?:https?|unix):\S+)", line):
                url = "http://socket" if uds else found[1]
                break
        else:
            raise AssertionError(f"The server ended:\n{self.log}")
        trust: Any = True if verify is True else ssl.create_default_context(cafile=str(verify))
        transport = httpx.HTTPTransport(uds=uds, verify=trust)
        with httpx.Client(transport=transport) as http:
            for _ in range(100):
                try:
                    if http.get(f"{url}/health").status_code == 200:
                        return url
                except httpx.TransportError:
                    time.sleep(0.02)
        raise AssertionError("The server is not healthy.")

    def wait_exit(self) -> int:
        """The exit status."""
        rest, _ = self.process.communicate(timeout=20)
        self.log += rest
        return self.process.returncode

    def core_pids(self) -> list[int]:
        """The children of the server, oldest first: the core, then fronts where there are several."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def wait_gone(pids: list[int]) -> None:
    """Return when none of the processes is running; within the 10 seconds that are promised."""
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
