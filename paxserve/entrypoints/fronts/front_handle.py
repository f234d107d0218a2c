"""A front process as the launcher sees it."""

import asyncio
import socket
import sys

from paxserve.engine.core_client import child_environment, how_it_ended
from paxserve.entrypoints.fronts import front_channel
from paxserve.entrypoints.fronts.front_channel import FrontFailed, FrontOrder, FrontReady, ToFront
from paxserve.errors import ConfigError, EngineDeadError


class FrontHandle:
    """A running front process."""

    def __init__(self, order: FrontOrder, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self.order = order
        self._process, self._channel = process, channel
        self.exited = asyncio.ensure_future(process.wait())
        """Its exit status, once it has ended."""

    @classmethod
    async def start(cls, order: FrontOrder) -> "FrontHandle":
        """Start the process; it hears its order, secrets and all, over a channel that nobody else sees."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "paxserve.entrypoints.fronts.front_process", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                env=child_environment(),
                pass_fds=(theirs.fileno(), order.listener),
                start_new_session=True,  # a terminal's Ctrl-C is for the launcher to handle
            )  # fmt: skip
        handle = cls(order, process, ours)
        handle.send(order)
        ours.setblocking(False)
        return handle

    async def ready(self) -> None:
        """Return when it can let clients in. Raises `ConfigError` with its own message when it cannot start."""
        loop, received = asyncio.get_running_loop(), bytearray()
        while not received.endswith(b"\n"):
            try:
                piece = await loop.sock_recv(self._channel, 65536)
            except ConnectionError:  # it has not even read its order
                piece = b""
            if not piece:
                raise EngineDeadError(f"A front process {how_it_ended(await self.exited)} while it started.")
            received += piece
        match front_channel.from_front.decode(received):
            case FrontFailed(message):
                raise ConfigError(message)
            case FrontReady():
                return

    def send(self, message: ToFront) -> None:
        """Tell it something; one that has just ended does not hear it."""
        try:
            self._channel.sendall(front_channel.line(message))
        except OSError:
            pass

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            self._process.kill()

    def close(self) -> None:
        """Let go of the channel of one that has ended."""
        self._channel.close()
