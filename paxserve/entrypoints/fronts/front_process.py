"""One of several front processes: the whole HTTP server, on a socket and a core that it shares with the others.

Started by the launcher as `python -m paxserve.entrypoints.fronts.front_process`; it lives as long as the launcher does.
"""

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

import uvicorn

from paxserve.engine import wire
from paxserve.engine.board import Board
from paxserve.engine.core_link import CoreLink
from paxserve.entrypoints import server
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.fronts.front_channel import CoreEnded, FrontChannel, FrontFailed, FrontReady, Serve, Stop
from paxserve.entrypoints.fronts.metrics_pool import MetricsPool
from paxserve.entrypoints.fronts.peers import Peers
from paxserve.entrypoints.stop_requests import STOP_SIGNALS, StopRequests
from paxserve.errors import ConfigError
from paxserve.log import configure_logging

logger = logging.getLogger(__name__)

SAVE_SECONDS = 1.0
"""How often a front puts down what it has counted, so that no more is lost when it dies."""

LINGER_MS = 1000
"""How long the last messages to the core may take to leave."""


class SharedCore(CoreLink):
    """A link to the core of all fronts, whose end the launcher tells of."""

    def __init__(self, folder: Path, front: int) -> None:
        super().__init__(folder, front)
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.send(wire.Join(front))

    async def wait_exit(self) -> int:
        """The core's exit status, once it has ended."""
        return await asyncio.shield(self.exit_code)


class OneOfMany:
    """A front among others. It must be made in a running event loop."""

    def __init__(self, channel: FrontChannel, listener: socket.socket) -> None:
        order = channel.order
        self._channel, self._folder = channel, Path(order.folder)
        self.front, self.created, self.listener = order.front, order.created, listener
        self.board = Board(self._folder / wire.BOARD, num_places=order.server.api_server_count, place=order.place)
        self.client = SharedCore(self._folder, order.front)
        self._stop = StopRequests()
        self._serve = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._hear())]
        channel.listen()

    def stop_requests(self) -> StopRequests:
        """What the launcher says: signals are sent to it, and perhaps to all processes at once."""
        return self._stop

    async def open(self, context: ServingContext) -> None:
        """Answer the other fronts; let clients in when the launcher does."""
        pool = MetricsPool(self.front, self._folder, context.engine.metrics)
        context.desk.save_metrics = pool.save
        peers = Peers(self.front, self._folder, context.engine, context.desk, pool)
        context.fronts = peers
        await peers.open()
        self._tasks.append(asyncio.ensure_future(keep_saving(pool)))
        self._channel.send(FrontReady())
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._serve, self._stop.asked)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    def give_up(self) -> None:
        """The launcher ends the core."""

    async def close(self) -> None:
        """Let go of everything but the listening socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.client.close_sockets(LINGER_MS)

    async def _hear(self) -> None:
        while True:
            match await self._channel.messages.get():
                case Serve():
                    self._serve.set()
                case Stop():
                    self._stop.ask()
                case CoreEnded(exit_code):
                    self.client.exit_code.set_result(exit_code)


async def keep_saving(pool: MetricsPool) -> None:
    """Put down what was counted now and then."""
    while True:
        pool.save()
        await asyncio.sleep(SAVE_SECONDS)


async def serve(channel: FrontChannel, listener: socket.socket, config: uvicorn.Config) -> int:
    """Be a front until told to stop; the exit status."""
    station = OneOfMany(channel, listener)
    try:
        return await server.serve(station, channel.order.engine, channel.order.server, config)
    finally:
        await station.close()


def main() -> int:
    """Read the order and follow it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    channel = FrontChannel(int(sys.argv[1]))
    order = channel.order
    configure_logging(form=order.server.log_format)
    try:
        return server.run(lambda config: serve(channel, socket.socket(fileno=order.listener), config), order.server)
    except ConfigError as error:
        channel.send(FrontFailed(str(error)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
