"""The process around several fronts: it has the port and the core, starts the fronts, and watches over all of them."""

import asyncio
import logging
import socket
import time
from typing import Any

from paxserve.config import EngineConfig
from paxserve.engine import wire
from paxserve.engine.board import Board
from paxserve.engine.core_client import CoreClient, how_it_ended
from paxserve.entrypoints.fronts.front_channel import CoreEnded, FrontOrder, Serve, Stop, ToFront
from paxserve.entrypoints.fronts.front_handle import FrontHandle
from paxserve.entrypoints.listener import log_serving, shown_address
from paxserve.entrypoints.stats_log import log_stats
from paxserve.entrypoints.stop_requests import StopSignals
from paxserve.entrypoints.waiting_room import WaitingRoom
from paxserve.log import configure_logging
from paxserve.messages import EngineStats
from paxserve.server_config import ServerConfig

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long fronts may take to leave beyond what their requests were given."""


def run(
    client: CoreClient,
    listener: socket.socket,
    waiting_room: WaitingRoom,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    started: float,
) -> int:
    """Serve on `listener` with as many fronts as the configuration says; the exit status."""
    configure_logging(server_config.log_level, server_config.log_format)
    logger.info("Loading %s", engine_config.model.model)
    launcher = Launcher(client, listener, engine_config, server_config)
    return asyncio.run(launcher.run(waiting_room, started))


class Launcher:
    """Keeps a front at every place: one that dies is replaced, and the others do not notice.

    Only a front that dies before it serves ends the server: the next one would do no better.
    """

    def __init__(
        self, client: CoreClient, listener: socket.socket, engine_config: EngineConfig, server_config: ServerConfig
    ) -> None:
        self.stats = EngineStats()
        self._client, self._listener = client, listener
        self._engine_config, self._config = engine_config, server_config
        self._board = Board(client.folder / wire.BOARD, num_places=server_config.api_server_count)
        self._created = int(time.time())
        self._fronts: dict[int, FrontHandle] = {}
        """The newest front of each place."""
        self._num_started = 0
        self._is_ending = False
        self._core_gone = asyncio.Event()

    async def run(self, waiting_room: WaitingRoom, started: float) -> int:
        """Serve until told to stop (0), or until the core has died or a front cannot be replaced (1)."""
        stop = StopSignals(asyncio.get_running_loop())
        asked = asyncio.ensure_future(stop.asked.wait())
        others: list[asyncio.Future[None]] = []
        try:
            beginning = asyncio.ensure_future(self._begin())
            others.append(beginning)
            await asyncio.wait({asked, beginning}, return_when=asyncio.FIRST_COMPLETED)
            if not beginning.done():
                self._client.kill()
                return 0
            beginning.result()
            waiting_room.close()
            self._tell(Serve())
            names = self._config.served_model_name or [self._engine_config.model.model]
            log_serving(names, shown_address(self._listener, self._config), started)
            others += [asyncio.ensure_future(task) for task in (self._hear_core(), self._watch_core(), log_stats(self))]
            return await self._keep_all(stop, asked, others)
        finally:
            stop.ignore()
            for task in (asked, *others):
                task.cancel()
            await asyncio.gather(asked, *others, return_exceptions=True)
            await self._kill_all()

    async def _begin(self) -> None:
        """Return when the core and every front can serve. Raises what the first of them that cannot says."""
        places = range(self._config.api_server_count)
        tasks = [asyncio.ensure_future(task) for task in (self._client.ready(), *map(self._start, places))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, place: int) -> FrontHandle:
        """A front at this place that can serve."""
        self._num_started += 1  # 0 is the launcher itself, and no number is used twice
        order = FrontOrder(
            engine=self._engine_config, server=self._config, folder=str(self._client.folder),
            front=self._num_started, place=place, listener=self._listener.fileno(), created=self._created,
        )  # fmt: skip
        front = self._fronts[place] = await FrontHandle.start(order)
        if self._is_ending:  # since the others were told
            front.send(Stop())
        await front.ready()
        return front

    async def _keep_all(self, stop: StopSignals, asked: asyncio.Future[Any], others: list[asyncio.Future[None]]) -> int:
        keepers = [asyncio.ensure_future(self._keep(place)) for place in self._fronts]
        gone = asyncio.ensure_future(self._core_gone.wait())
        others += [*keepers, gone]
        await asyncio.wait({asked, gone, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        self._is_ending = True
        for keeper in keepers:
            if keeper.done() and (error := keeper.exception()) is not None:
                logger.error("A front process cannot be replaced, so the server ends: %s", error)
        self._board.state = "draining"  # first of all: no front may be asked for what another one refuses
        if asked.done():
            logger.info("Told to stop: running requests may finish; a second signal ends them")
        self._tell(Stop())
        stop.on_request = lambda count: self._tell(Stop())
        await asyncio.wait(keepers, timeout=self._config.shutdown_timeout + PATIENCE_SECONDS)
        return 0 if asked.done() and not self._core_gone.is_set() else 1

    async def _keep(self, place: int) -> None:
        """Put another front in the place of one that has ended, until the end. Raises when that one cannot start."""
        while True:
            front = self._fronts[place]
            exit_code, number = await front.exited, front.order.front
            self._client.send(wire.Leave(number))
            front.close()
            if self._is_ending:
                return
            logger.error(
                "Front process %d %s: what it answered is lost. It is replaced", number, how_it_ended(exit_code)
            )
            self._board.clear(place)
            for name in (f"peer-{number}", wire.outputs_name(number)):
                (self._client.folder / name).unlink(missing_ok=True)
            front = await self._start(place)
            front.send(Serve())
            logger.info("Front process %d serves in its place", front.order.front)

    async def _hear_core(self) -> None:
        """Take in what the core says to its starter."""
        while True:
            match await self._client.receive():
                case wire.Outputs(_, stats):
                    self.stats = stats
                case wire.Died(reason):
                    logger.error("The engine core died: %s", reason)
                    self._core_gone.set()

    async def _watch_core(self) -> None:
        exit_code = await self._client.wait_exit()
        self._core_gone.set()
        self._tell(CoreEnded(exit_code))

    def _tell(self, message: ToFront) -> None:
        for front in self._fronts.values():
            front.send(message)

    async def _kill_all(self) -> None:
        for front in self._fronts.values():
            front.kill()
        await asyncio.gather(*(front.exited for front in self._fronts.values()))
        for front in self._fronts.values():
            front.close()
