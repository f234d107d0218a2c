"""The core's way back to the front processes: a socket for each, and whose each request in flight is."""

import time
from collections.abc import Callable, Iterable

import zmq

from paxserve.engine import wire
from paxserve.messages import DecodedTokens, EngineOutput, EngineRequest, EngineStats, StepOutputs

FIRST = 0
"""The process that started the core. It is the only front, or it keeps the fronts and sends no request itself."""

STATS_SECONDS = 0.1
"""How often a front hears of steps that brought it nothing: for gauges this is often enough."""


class FrontRoutes:
    """Sends what the core makes to the fronts that asked for it. With one front that is all of it, unread.

    `connect` opens the socket of a front that joins. Numbers of fronts are never used twice, so that what a front left
    behind on its way reaches nobody else.
    """

    def __init__(self, first: zmq.Socket, connect: Callable[[int], zmq.Socket]) -> None:
        self._sockets = {FIRST: first}
        self._connect = connect
        self._owners: dict[str, tuple[int, set[int]]] = {}
        """By request: its front, and the choices that have not ended."""
        self._told: dict[int, float] = {}

    def join(self, front: int) -> None:
        """Expect requests of this front."""
        self._sockets[front] = self._connect(front)
        self._told |= {FIRST: 0.0, front: 0.0}

    def leave(self, front: int) -> list[str]:
        """Forget a front, and what was to be sent to it; returns its requests in flight."""
        if front != FIRST and front in self._sockets:
            del self._told[front]
            self._sockets.pop(front).close(linger=0)
        left = [request_id for request_id, (owner, _) in self._owners.items() if owner == front]
        for request_id in left:
            del self._owners[request_id]
        return left

    def own(self, request: EngineRequest, front: int) -> bool:
        """Note whose request this is; False for a front that has left, whose requests nobody waits for."""
        if front != FIRST and front in self._sockets:
            self._owners[request.request_id] = front, set(range(request.params.n))
        return front in self._sockets

    def disown(self, keys: Iterable[tuple[str, int | None]]) -> None:
        """Forget requests, or single choices of them, that have ended."""
        for request_id, index in keys:
            _, choices = self._owners.get(request_id, (FIRST, set[int]()))
            choices.discard(-1 if index is None else index)
            if index is None or not choices:
                self._owners.pop(request_id, None)

    def send(self, message: wire.FromCore, front: int = FIRST) -> None:
        """Queue a message for one front."""
        if (socket := self._sockets.get(front)) is not None:
            socket.send(wire.encode(message))

    def tell_all(self, message: wire.FromCore) -> None:
        """Queue a message for every front."""
        for front in self._sockets:
            self.send(message, front)

    def send_step(self, outputs: StepOutputs | list[EngineOutput], stats: EngineStats) -> None:
        """Send what a step brought to whom it belongs, and the state after it to everybody now and then."""
        if not self._told:
            self.send(wire.Outputs.of(outputs, stats))
            return
        now = time.monotonic()
        shares = self._shares(StepOutputs(outputs) if isinstance(outputs, list) else outputs)
        for front, last in self._told.items():
            if front in shares or now - last >= STATS_SECONDS:
                self.send(wire.Outputs.of(shares.get(front, []), stats), front)
                self._told[front] = now

    def check_integrity(self, *, is_idle: bool) -> None:
        """Assert that no request is remembered longer than the core has it; for tests."""
        assert not (is_idle and self._owners), self._owners
        assert all(front in self._sockets and choices for front, choices in self._owners.values())

    def close(self) -> None:
        """Close the sockets; what is on its way still gets there."""
        for socket in self._sockets.values():
            socket.close()

    def _shares(self, outputs: StepOutputs) -> dict[int, StepOutputs]:
        """The outputs of each front; those of requests that were aborted meanwhile are nobody's."""
        owners, shares = self._owners, dict[int, StepOutputs]()
        for output in outputs.listed:
            owner = owners.get(output.request_id)
            if owner is not None:
                shares.setdefault(owner[0], StepOutputs([])).listed.append(output)
                if output.finish_reason is not None:
                    self.disown([(output.request_id, output.index)])
        if outputs.decoded is not None:
            for request_id, index, tokens in zip(*outputs.decoded.columns(), strict=True):
                owner = owners.get(request_id)
                if owner is not None:
                    share = shares.setdefault(owner[0], StepOutputs([]))
                    if share.decoded is None:
                        share.decoded = DecodedTokens([], [], [])
                    share.decoded.append(request_id, index, tokens)
        return shares
