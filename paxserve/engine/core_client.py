"""The engine core's process as seen by the one that started it: its birth, its link, its end."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from paxserve.config import EngineConfig
from paxserve.engine import wire
from paxserve.engine.core_link import CoreLink
from paxserve.errors import EngineDeadError
from paxserve.log import LogFormat
from paxserve.messages import ModelInfo

ENGINE_CORE = "paxserve.engine.cores:open_core"

MAX_SOCKET_PATH = 100
"""Longest path of a Unix socket that every system takes, less a little."""

MAX_SOCKET_NAME = 24
"""What is kept of it for the names of the sockets in a folder."""

LAST_WORDS_SECONDS = 0.3
"""How long messages of a process that has ended may still be on their way."""

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Asks Linux for huge pages under weights and KV pool, which on CPU are read at every step (docs/performance.md)."""


class CoreClient(CoreLink):
    """A running engine core process. `launch` returns at once; `ready` waits until it serves."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        super().__init__(folder)

    @classmethod
    def launch(cls, config: EngineConfig, core: str = ENGINE_CORE, log_format: LogFormat = "text") -> "CoreClient":
        """Start the process of the core named `core` (`module:class`)."""
        folder = Path(tempfile.mkdtemp(prefix="paxserve-"))
        if len(str(folder)) > MAX_SOCKET_PATH - MAX_SOCKET_NAME:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="paxserve-", dir="/tmp"))
        order = wire.LaunchOrder(config=config, core=core, folder=str(folder), log_format=log_format)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paxserve.engine.core_process"],
            stdin=subprocess.PIPE,
            env={"GLIBC_TUNABLES": HUGE_PAGES, **child_environment()},
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()  # and stays open: its end is how the child learns of ours
        return cls(process, folder)

    async def ready(self) -> ModelInfo:
        """As for any link; a process that ends instead is an `EngineDeadError`."""
        info = asyncio.ensure_future(super().ready())
        exit_code = asyncio.ensure_future(self.wait_exit())
        await asyncio.wait({info, exit_code}, return_when=asyncio.FIRST_COMPLETED)
        if not info.done():
            await asyncio.wait({info}, timeout=LAST_WORDS_SECONDS)
        exit_code.cancel()
        if info.done():
            return info.result()
        info.cancel()
        raise EngineDeadError(f"The engine core {how_it_ended(self.process.returncode)} while it started.")

    async def wait_exit(self) -> int:
        """The exit status of the process, once it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wait() -> None:
            self.process.wait()
            try:
                loop.call_soon_threadsafe(ended.set)
            except RuntimeError:
                pass  # the loop has been closed: nobody waits any more

        threading.Thread(target=wait, name="core-watch", daemon=True).start()
        await ended.wait()
        return self.process.returncode

    def kill(self) -> None:
        """End the process at once."""
        if self.process.poll() is None:
            self.process.kill()

    def close(self, timeout: float = 5.0) -> None:
        """End the process, by force when it does not leave within `timeout` seconds, and clean up after it."""
        if self.process.poll() is None:
            self.send(wire.Shutdown())
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.close_sockets()
        shutil.rmtree(self.folder, ignore_errors=True)


def child_environment() -> dict[str, str]:
    """The environment of a process of ours: it imports from where this one does, and from no folder that it happens to
    stand in."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}


def how_it_ended(exit_code: int | None) -> str:
    """Words for an exit status: a negative one is the signal that killed the process."""
    if exit_code is not None and exit_code < 0:
        hint = " (out of memory?)" if exit_code == -9 else ""
        return f"was killed by signal {-exit_code}{hint}"
    return f"ended with status {exit_code}"
