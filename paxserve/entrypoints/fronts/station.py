"""Where a front process stands: what it shares a server with, who tells it to stop, when it may let clients in."""

import socket
from typing import Protocol

from paxserve.engine.async_engine import Client
from paxserve.engine.board import Board
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.stop_requests import StopRequests
from paxserve.messages import ModelInfo


class StationClient(Client, Protocol):
    """A core that may not be ready yet."""

    async def ready(self) -> ModelInfo:
        """What it knows of its model once it is."""
        ...


class Station(Protocol):
    """One of a server's fronts, or the only one."""

    @property
    def client(self) -> StationClient:
        """The way to the core."""
        ...

    listener: socket.socket
    board: Board
    front: int
    """Its number; 0 for the only one."""
    created: int
    """When the server was started, in seconds."""

    def stop_requests(self) -> StopRequests:
        """What tells it to stop; needs a running event loop."""
        ...

    async def open(self, context: ServingContext) -> None:
        """Return when clients may be let in, or when it was told to stop."""
        ...

    def give_up(self) -> None:
        """It was told to stop before it was ready."""
        ...
