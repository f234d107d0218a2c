"""The process that serves alone: it has started the core, and is its one front."""

import asyncio
import socket
import time

from paxserve.config import EngineConfig
from paxserve.engine.board import Board
from paxserve.engine.core_client import CoreClient
from paxserve.entrypoints import server
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.listener import log_serving, shown_address
from paxserve.entrypoints.stop_requests import StopRequests, StopSignals
from paxserve.entrypoints.waiting_room import WaitingRoom
from paxserve.server_config import ServerConfig


class OnlyFront:
    """The one station of its server."""

    front = 0

    def __init__(self, client: CoreClient, listener: socket.socket, waiting_room: WaitingRoom, started: float) -> None:
        self.client, self.listener, self.board = client, listener, Board()
        self.created = int(time.time())
        self._core, self._waiting_room, self._started = client, waiting_room, started

    def stop_requests(self) -> StopRequests:
        """Signals."""
        return StopSignals(asyncio.get_running_loop())

    async def open(self, context: ServingContext) -> None:
        """From here on clients wait in line rather than being turned away."""
        self._waiting_room.close()
        log_serving(context.model_names, shown_address(self.listener, context.server_config), self._started)

    def give_up(self) -> None:
        """Nobody else needs the core."""
        self._core.kill()


def run(
    client: CoreClient,
    listener: socket.socket,
    waiting_room: WaitingRoom,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    started: float,
) -> int:
    """Serve on `listener`; the exit status."""
    station = OnlyFront(client, listener, waiting_room, started)
    return server.run(lambda config: server.serve(station, engine_config, server_config, config), server_config)
