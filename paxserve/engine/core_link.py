"""A front's sockets to the engine core, whoever started its process."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from paxserve.engine import wire
from paxserve.engine.front_routes import FIRST
from paxserve.errors import ConfigError, EngineDeadError
from paxserve.messages import EngineRequest, EngineStats, ModelInfo


class CoreLink:
    """Sends requests to the core with the sockets in `folder`, and hears what becomes of them."""

    def __init__(self, folder: Path, front: int = FIRST) -> None:
        self.folder = folder
        self.front = front
        self._context = zmq.asyncio.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.set_hwm(0)
        self._outputs.bind(f"ipc://{folder}/{wire.outputs_name(front)}")
        self._requests = zmq.Context(self._context).socket(zmq.PUSH)
        self._requests.set_hwm(0)
        self._requests.reconnect_ivl = 20  # the core binds its end a moment after its birth
        self._requests.connect(f"ipc://{folder}/{wire.REQUESTS}")
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[bool | EngineStats | None]] = {}

    async def ready(self) -> ModelInfo:
        """What the core knows about its model, once it has loaded and compiled everything.

        Raises `ConfigError` with the core's own message when it cannot start.
        """
        match await self.receive():
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
        self.send(wire.AddRequest(request, self.front))

    def abort_requests(self, keys: list[tuple[str, int | None]]) -> None:
        """Tell the core to stop requests, or single choices of them."""
        self.send(wire.AbortRequests(keys))

    async def call(self, method: str) -> Any:
        """The result of a method of the core that `wire.CALLS` lists."""
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.send(wire.Call(call_id, method, self.front))
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

    def send(self, message: wire.ToCore) -> None:
        """Queue a message for the core."""
        self._requests.send(wire.encode(message), zmq.NOBLOCK)

    def close_sockets(self, linger_ms: int = 0) -> None:
        """Close both ends; what is on its way has `linger_ms` to get there."""
        self._outputs.close(linger=0)
        self._requests.close(linger=linger_ms)
        self._context.term()
