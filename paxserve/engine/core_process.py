"""The process around the engine core: messages in, steps while there is work, messages out.

Started by `CoreClient` as `python -m paxserve.engine.core_process`; it lives as long as the pipe on its
standard input, so that it can never outlive the front.
"""

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from bisect import bisect_left
from typing import Any

import msgspec
import zmq

from paxserve.engine import wire
from paxserve.engine.front_routes import FIRST, FrontRoutes
from paxserve.errors import ConfigError, RequestError
from paxserve.log import configure_logging
from paxserve.messages import STEP_TOKEN_BUCKETS, EngineStats

logger = logging.getLogger(__name__)

LINGER_MS = 2000
"""How long the last messages may take to leave a process that ends."""


class CoreLoop:
    """Feeds an engine core from one socket and sends what it makes to the fronts."""

    def __init__(self, core: Any, requests: zmq.Socket, routes: FrontRoutes) -> None:
        self.core = core
        self.requests = requests
        self.routes = routes
        self.stopping = self.is_frozen = False
        self._num_steps = self._step_tokens = 0
        self._step_sizes = [0] * (len(STEP_TOKEN_BUCKETS) + 1)

    @property
    def has_work(self) -> bool:
        """Whether a step is due."""
        return not self.is_frozen and self.core.has_unfinished_requests()

    def freeze(self) -> bool:
        """Take no step until `thaw`; whether that changes anything. Requests keep what they have."""
        was_frozen, self.is_frozen = self.is_frozen, True
        return not was_frozen

    def thaw(self) -> bool:
        """Step again; whether that changes anything."""
        was_frozen, self.is_frozen = self.is_frozen, False
        return was_frozen

    def run(self) -> None:
        """Step while there is work, sleep on the socket while there is none, until told to stop."""
        while not self.stopping:
            if not self.has_work:
                # The gauges must not freeze at their last value: the step that emptied the engine is told too.
                self.routes.tell_all(wire.Outputs([], self.stats()))
                self.requests.poll()
            self.drain()
            if self.has_work:
                self.routes.send_step(self.core.step(), self.stats())

    def drain(self) -> None:
        """Handle every message that has come, without waiting for more."""
        while not self.stopping:
            try:
                payload = self.requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.handle(wire.decode_to_core(payload))

    def handle(self, message: wire.ToCore) -> None:
        """Do what one message asks."""
        match message:
            case wire.AddRequest(request, front):
                if self.routes.own(request, front):
                    self.add(request, front)
            case wire.AbortRequests(keys):
                self.abort(keys)
            case wire.Call(call_id, method, front):
                self.routes.send(self.call(call_id, method), front)
            case wire.Join(front):
                self.routes.join(front)
                self.routes.send(wire.Ready(self.core.model_info), front)
            case wire.Leave(front):
                self.abort([(request_id, None) for request_id in self.routes.leave(front)])
            case wire.Shutdown():
                self.stopping = True

    def add(self, request: Any, front: int) -> None:
        """Hand a request to the core, or tell the front why it does not take it."""
        try:
            self.core.add_request(request)
        except RequestError as error:
            refusal = wire.Refused(
                request_id=request.request_id, message=error.message, param=error.param, code=error.code
            )
            self.routes.send(refusal, front)
            self.routes.disown([(request.request_id, None)])

    def abort(self, keys: list[tuple[str, int | None]]) -> None:
        """Stop requests, or single choices of them, whose fronts wait no more."""
        self.core.abort_requests(keys)
        self.routes.disown(keys)

    def stats(self) -> EngineStats:
        """The core's counters and gauges after a step, or after none, and how large its steps were."""
        stats: EngineStats = self.core.stats()
        if stats.num_steps > self._num_steps:
            self._num_steps = stats.num_steps
            self._step_tokens += stats.last_step_tokens
            self._step_sizes[bisect_left(STEP_TOKEN_BUCKETS, stats.last_step_tokens)] += 1
        stats.step_sizes, stats.step_tokens = self._step_sizes, self._step_tokens
        return stats

    def check_integrity(self) -> None:
        """Assert the core's invariants and the loop's own; for tests."""
        self.core.check_integrity()
        self.routes.check_integrity(is_idle=not self.core.has_unfinished_requests())

    def call(self, call_id: int, method: str) -> wire.Reply:
        """The reply to a `Call`."""
        if method not in wire.CALLS:
            return wire.Reply(call_id=call_id, error=f"The engine core has no call {method!r}.")
        owner = self if method in wire.LOOP_CALLS else self.core
        return wire.Reply(call_id=call_id, value=getattr(owner, method)())


def read_order() -> wire.LaunchOrder:
    """The launch order: one line of JSON on standard input."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(sys.stdin.fileno(), 65536)
        if not chunk:
            raise SystemExit("paxserve.engine.core_process is started by the server, not by hand.")
        line += chunk
    return msgspec.json.decode(bytes(line), type=wire.LaunchOrder)


def exit_with_parent(folder: str) -> None:
    """End this process, whatever it does, once the front's end of standard input is gone, and its folder with it."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def build_core(order: wire.LaunchOrder) -> Any:
    """The engine core, loaded and compiled."""
    module, _, name = order.core.partition(":")
    core = getattr(importlib.import_module(module), name)(order.config)
    gc.collect()
    gc.freeze()  # what was loaded stays for good: a full collection would walk all of it, in the middle of a step
    return core


def main() -> int:
    """Build the core, say so, run it; the exit status is 0 after a `Shutdown`, else 1."""
    order = read_order()
    exit_with_parent(order.folder)
    # The front decides when to stop: a service manager or a terminal signals both processes at once, and the
    # front still wants its running requests answered.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(form=order.log_format)
    context = zmq.Context()
    requests = open_socket(context, zmq.PULL)
    requests.bind(f"ipc://{order.folder}/{wire.REQUESTS}")
    routes = connect_fronts(context, order.folder)
    try:
        core = build_core(order)
        routes.send(wire.Ready(core.model_info))
        CoreLoop(core, requests, routes).run()
    except ConfigError as error:
        routes.send(wire.Failed(str(error)))
        return 1
    except Exception as error:
        logger.error("The engine core failed:\n%s", traceback.format_exc().rstrip())
        routes.tell_all(wire.Died(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        requests.close()
        routes.close()
        context.term()
    return 0


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that holds as many messages as come: what it may have in flight is limited elsewhere."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = LINGER_MS
    return socket


def connect_fronts(context: zmq.Context[zmq.Socket[bytes]], folder: str) -> FrontRoutes:
    """The routes to the fronts that have their ends in `folder`."""

    def connect(front: int) -> zmq.Socket[bytes]:
        socket = open_socket(context, zmq.PUSH)
        socket.connect(f"ipc://{folder}/{wire.outputs_name(front)}")
        return socket

    return FrontRoutes(connect(FIRST), connect)


if __name__ == "__main__":
    sys.exit(main())
