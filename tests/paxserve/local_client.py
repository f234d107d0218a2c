"""A core client whose core runs in this process: the server's tests without a second process."""

import asyncio
from typing import Any

from paxserve.engine import wire
from paxserve.engine.core_process import CoreLoop
from paxserve.engine.front_routes import FrontRoutes
from paxserve.errors import EngineDeadError
from paxserve.messages import EngineRequest


class LocalClient:
    """Runs a core's loop as a task, with every message encoded and decoded as between processes."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.added: list[EngineRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.inbox: asyncio.Queue[wire.FromCore] = asyncio.Queue()
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.exited: asyncio.Future[int] | None = None
        self.routes = FrontRoutes(self, None)  # type: ignore[arg-type]
        self.loop = CoreLoop(core, None, self.routes)  # type: ignore[arg-type]
        self.wake = asyncio.Event()

    def send(self, payload: bytes) -> None:
        self.inbox.put_nowait(wire.decode_from_core(payload))

    def deliver(self, message: wire.ToCore) -> None:
        self.loop.handle(wire.decode_to_core(wire.encode(message)))
        self.wake.set()

    async def run(self) -> None:
        """Step the core while it has work."""
        while True:
            self.routes.tell_all(wire.Outputs([], self.loop.stats()))
            await self.wake.wait()
            self.wake.clear()
            while self.loop.has_work:
                try:
                    outputs = self.core.step()
                except RuntimeError as error:
                    self.routes.send(wire.Died(f"RuntimeError: {error}"))
                    return
                self.routes.send_step(outputs, self.loop.stats())
                await asyncio.sleep(0)

    def add_request(self, request: EngineRequest) -> None:
        self.added.append(request)
        self.deliver(wire.AddRequest(request))

    def abort_requests(self, keys: list[tuple[str, int | None]]) -> None:
        self.aborted += keys
        self.deliver(wire.AbortRequests(keys))

    async def call(self, method: str) -> Any:
        future = self.calls[0] = asyncio.get_running_loop().create_future()
        self.deliver(wire.Call(0, method))
        return await future

    def resolve_call(self, reply: wire.Reply) -> None:
        self.calls.pop(reply.call_id).set_result(reply.value)

    def fail_calls(self, error: EngineDeadError) -> None:
        for future in self.calls.values():
            future.set_exception(error)

    async def receive(self) -> wire.FromCore:
        return await self.inbox.get()

    async def wait_exit(self) -> int:
        self.exited = asyncio.get_running_loop().create_future()
        return await self.exited
