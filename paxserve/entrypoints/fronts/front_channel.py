"""What the launcher and a front tell each other: a JSON object a line, over a pair of sockets that only they have."""

import asyncio
import logging
import os
import socket
import threading
from typing import Any, BinaryIO

import msgspec

from paxserve.config import EngineConfig
from paxserve.server_config import ServerConfig

logger = logging.getLogger(__name__)


class FrontOrder(msgspec.Struct, tag=True, kw_only=True):
    """The first line to a front: what it is to do."""

    engine: EngineConfig
    server: ServerConfig
    folder: str
    """Private folder of sockets, board and metrics."""
    front: int
    """Its number, which no front has had before."""
    place: int
    """Where on the board it writes: fronts that follow each other have the same."""
    listener: int
    """Descriptor of the socket on which clients come in."""
    created: int


class Serve(msgspec.Struct, tag=True):
    """To a front: let clients in."""


class Stop(msgspec.Struct, tag=True):
    """To a front: end in good order; for the second time, at once."""


class CoreEnded(msgspec.Struct, tag=True):
    """To a front: the engine core's process has ended with this status."""

    exit_code: int


class FrontReady(msgspec.Struct, tag=True):
    """From a front: it can let clients in."""


class FrontFailed(msgspec.Struct, tag=True):
    """From a front: it cannot start, for a reason that the user can mend."""

    message: str


ToFront = FrontOrder | Serve | Stop | CoreEnded
FromFront = FrontReady | FrontFailed

to_front: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ToFront)
from_front: msgspec.json.Decoder[Any] = msgspec.json.Decoder(FromFront)


def line(message: ToFront | FromFront) -> bytes:
    """The message for the channel."""
    return msgspec.json.encode(message) + b"\n"


class FrontChannel:
    """The front's end. The process ends with the launcher: when the channel does, whatever it is doing."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines: BinaryIO = self._socket.makefile("rb")
        order = to_front.decode(self._lines.readline())
        assert isinstance(order, FrontOrder)
        self.order = order
        self.messages: asyncio.Queue[Serve | Stop | CoreEnded] = asyncio.Queue()

    def listen(self) -> None:
        """Put messages into the queue from now on; needs a running event loop."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            for text in self._lines:
                loop.call_soon_threadsafe(self.messages.put_nowait, to_front.decode(text))
            os._exit(1)

        threading.Thread(target=read, name="launcher-watch", daemon=True).start()

    def send(self, message: FromFront) -> None:
        """Tell the launcher."""
        self._socket.sendall(line(message))
