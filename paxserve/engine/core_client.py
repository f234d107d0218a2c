"""The front's end of the engine core's process: starts it, talks to it, and knows when it has died."""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from paxserve.config import EngineConfig
from paxserve.engine import wire
from paxserve.errors import ConfigError, EngineDeadError
from paxserve.log import LogFormat
from paxserve.messages import EngineRequest, EngineStats, ModelInfo

ENGINE_CORE = "paxserve.engine.cores:open_core"

MAX_SOCKET_PATH = 100
"""Longest path of a Unix socket that every system takes, less a little."""

LAST_WORDS_SECONDS = 0.3
"""How long messages of a process that has ended may still be on their way."""

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Asks Linux for huge pages under weights and KV pool, which on CPU are read at every step (docs/performance.md)."""


class CoreClient:
    """A running engine core process. `launch` returns at once; `ready` waits until it serves."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self._context = zmq.asyncio.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.set_hwm(0)
        self._outputs.bind(f"ipc://{folder}/outputs")
        self._requests = zmq.Context(self._context).socket(zmq.PUSH)
        self._requests.set_hwm(0)
        self._requests.reconnect_ivl = 20  # the core binds its end a moment after its birth
        self._requests.connect(f"ipc://{folder}/requests")
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[bool | EngineStats | None]] = {}

    @classmethod
    def launch(cls, config: EngineConfig, core: str = ENGINE_CORE, log_format: LogFormat = "text") -> "CoreClient":
        """Start the process of the core named `core` (`module:class`)."""
        folder = Path(tempfile.mkdtemp(prefix="paxserve-"))
        if len(str(folder)) > MAX_SOCKET_PATH - len("/requests"):
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="paxserve-", dir="/tmp"))
        order = wire.LaunchOrder(config=config, core=core, folder=str(folder), log_format=log_format)
        # The child imports from where this process does, and from no folder that it happens to stand in.
        search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paxserve.engine.core_process"],
            stdin=subprocess.PIPE,
            env={"GLIBC_TUNABLES": HUGE_PAGES, **os.environ, "PYTHONPATH": search_path},
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()  # and stays open: its end is how the child learns of ours
        return cls(process, folder)

    async def ready(self) -> ModelInfo:
        """What the core knows about its model, once it has loaded and compiled everything.

        Raises `ConfigError` with the core's own message when it cannot start.
        """
        message = asyncio.ensure_future(self.receive())
        exit_code = asyncio.ensure_future(self.wait_exit())
        await asyncio.wait({message, exit_code}, return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            await asyncio.wait({message}, timeout=LAST_WORDS_SECONDS)
        exit_code.cancel()
        if not message.done():
            message.cancel()
            raise EngineDeadError(f"The engine core {how_it_ended(self.process.returncode)} while it started.")
        match message.result():
            case wire.Ready(model_info):
                return model_info
            case wire.Failed(reason):
                raise ConfigError(reason)
            case wire.Died(reason):
                raise EngineDeadError(f"The engine core failed while it started: {reason}")
            case other:
                raise EngineDeadError(f"The engine core sent {type(other).__name__} before it was ready.")

    def add_request(self, request: EngineRequest) -> None:
        """Give the core a request."""
        self._send(wire.AddRequest(request))

    def abort_requests(self, keys: list[tuple[str, int | None]]) -> None:
        """Tell the core to stop requests, or single choices of them."""
        self._send(wire.AbortRequests(keys))

    async def call(self, method: str) -> Any:
        """The result of a method of the core that `wire.CALLS` lists."""
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(wire.Call(call_id, method))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def resolve_call(self, reply: wire.Reply) -> None:
        """Hand a reply to whoever waits for it."""
        future = self._calls.pop(reply.call_id, None)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(EngineDeadError(reply.error))

    def fail_calls(self, error: EngineDeadError) -> None:
        """End every waiting call with `error`."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    async def receive(self) -> wire.FromCore:
        """The next message of the core."""
        return wire.decode_from_core(await self._outputs.recv())

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
            self._send(wire.Shutdown())
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._outputs.close(linger=0)
        self._requests.close(linger=0)
        self._context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, message: wire.ToCore) -> None:
        self._requests.send(wire.encode(message), zmq.NOBLOCK)


def how_it_ended(exit_code: int | None) -> str:
    """Words for an exit status: a negative one is the signal that killed the process."""
    if exit_code is not None and exit_code < 0:
        hint = " (out of memory?)" if exit_code == -9 else ""
        return f"was killed by signal {-exit_code}{hint}"
    return f"ended with status {exit_code}"
