"""The other fronts of a server: each listens on a socket in the private folder and does what it is asked."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from paxserve.engine.async_engine import AsyncEngine
from paxserve.entrypoints.fronts import peer_wire
from paxserve.entrypoints.fronts.all_fronts import FrontGoneError
from paxserve.entrypoints.fronts.desk import Desk, FollowResponse, Order, SaveMetrics
from paxserve.entrypoints.fronts.metrics_pool import MetricsPool
from paxserve.entrypoints.fronts.peer_wire import Failure, Piece, Refusal, Result
from paxserve.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

GONE = (OSError, EOFError)
"""What tells that the other side has ended."""

STATS_SECONDS = 2.0
"""How long a scrape waits for the core to say where it stands, and for other fronts to put down what they counted."""


def socket_path(folder: Path, front: int) -> Path:
    """Where a front listens to the others."""
    return folder / f"peer-{front}"


class Peers:
    """The fronts that have their sockets in `folder`, of which this is one."""

    def __init__(self, front: int, folder: Path, engine: AsyncEngine, desk: Desk, pool: MetricsPool) -> None:
        self._front, self._folder, self._engine, self._desk, self._pool = front, folder, engine, desk, pool
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begin to answer the others."""
        path = socket_path(self._folder, self._front)
        self._server = await asyncio.start_unix_server(self._converse, path)
        os.chmod(path, 0o600)

    async def close(self) -> None:
        """Answer the others no more."""
        if self._server is not None:
            self._server.close()
            socket_path(self._folder, self._front).unlink(missing_ok=True)
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    async def ask(self, front: int, order: Order) -> Any:
        """What a front answers: this one itself, another one through its socket."""
        if front == self._front:
            return await self._desk.do(order)
        try:
            return await self._ask_peer(front, order)
        except GONE:
            raise FrontGoneError(front) from None

    async def ask_all(self, order: Order) -> dict[int, Any]:
        """What each front answers; those that end meanwhile are left out."""
        names = [path.name.rpartition("-")[2] for path in self._folder.glob("peer-*")]
        fronts = sorted({self._front, *map(int, names)})
        answers = await asyncio.gather(*(self.ask(front, order) for front in fronts), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, FrontGoneError):
                raise answer
        told = zip(fronts, answers, strict=True)
        return {front: answer for front, answer in told if not isinstance(answer, FrontGoneError)}

    async def render_metrics(self) -> bytes:
        """The whole server's metrics: what each front counted added up, and what the core has counted by now.

        Whatever a scrape has told of a front was put down by it before, so that no later scrape, anywhere, tells less.
        """
        engine = self._engine
        try:
            async with asyncio.timeout(STATS_SECONDS):
                live = await self.ask_all(SaveMetrics())
                stats = await engine.call("stats")
            engine.metrics.engine.stats = max(stats, engine.metrics.engine.stats, key=lambda told: told.num_steps)
        except TimeoutError:
            logger.warning("Another front, or the engine core, did not say in time what it counted")
            live = {self._front: None}
        except EngineDeadError:
            live = {self._front: None}
        return self._pool.render(live)

    async def _ask_peer(self, front: int, order: Order) -> Any:
        reader, writer = await asyncio.open_unix_connection(socket_path(self._folder, front))
        try:
            await peer_wire.write(writer, order)
            answer = value_of(await peer_wire.read(reader, peer_wire.answers))
        except BaseException:
            writer.close()
            raise
        if isinstance(order, FollowResponse):
            return pieces(reader, writer)
        writer.close()
        return answer

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            work = asyncio.ensure_future(self._answer(await peer_wire.read(reader, peer_wire.orders), writer))
            left = asyncio.ensure_future(reader.read())  # nothing more is said: it ends when the other side leaves
            try:
                await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                left.cancel()
                await asyncio.gather(work, left, return_exceptions=True)
        except GONE:
            pass
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _answer(self, order: Order, writer: asyncio.StreamWriter) -> None:
        try:
            value = await self._desk.do(order)
            if not isinstance(value, AsyncGenerator):
                await peer_wire.write(writer, Result.of(value))
                return
            await peer_wire.write(writer, Result.of(None))
            async with aclosing(value):
                async for piece in value:
                    await peer_wire.write(writer, Piece(piece))
            await peer_wire.write(writer, Piece(b""))
        except RequestError as error:
            await peer_wire.write(writer, Refusal(error.message, error.param, error.code))
        except GONE:
            pass
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("An order of another front failed")
            await peer_wire.write(writer, Failure(str(error)))


def value_of(answer: peer_wire.Answer) -> Any:
    """What an answer brings. Raises the error that it tells of."""
    match answer:
        case Result():
            return answer.value
        case Refusal(message, param, code):
            raise RequestError(message, param, code)
        case Failure(message):
            raise EngineDeadError(message)
        case Piece():
            raise EOFError


async def pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncGenerator[bytes, None]:
    """The parts of an answer as they come. A front that ends in the middle is an `EngineDeadError`."""
    try:
        while True:
            answer = await peer_wire.read(reader, peer_wire.answers)
            if not isinstance(answer, Piece):
                value_of(answer)
                raise EOFError
            if not answer.content:
                return
            yield answer.content
    except GONE:
        raise EngineDeadError("The front process that held the response has ended.") from None
    finally:
        writer.close()
