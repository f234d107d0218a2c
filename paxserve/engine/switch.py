"""Stopping and starting the engine while the server stays: pauses, and sleep."""

from collections.abc import Awaitable, Callable
from typing import Literal

from paxserve.engine.async_engine import AsyncEngine

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the requests in flight: they are ended, waited for, or stay as they are to go on later."""


class EngineSwitch:
    """Pauses an engine or puts it to sleep; `quiet` ends the requests in flight, or waits for them, at every front."""

    def __init__(self, engine: AsyncEngine, quiet: Callable[[bool], Awaitable[None]]) -> None:
        self._engine, self._quiet = engine, quiet
        self._admission, self._board = engine.admission, engine.admission.board

    @property
    def is_paused(self) -> bool:
        """Whether new requests are held back."""
        return self._board.state == "paused"

    @property
    def is_asleep(self) -> bool:
        """Whether new requests are refused until `wake_up`."""
        return self._board.state == "asleep"

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Hold new requests back until `resume`."""
        self._admission.state = "paused"
        if mode == "keep":
            await self._engine.call("freeze")
            return
        await self._engine.call("thaw")
        await self._quiet(mode == "abort")

    async def resume(self) -> None:
        """Let requests begin again, and those go on that were kept."""
        await self._engine.call("thaw")
        self._admission.state = "open"

    async def sleep(self, mode: PauseMode = "abort", level: int = 1) -> bool:
        """Free the device's memory until `wake_up`; whether the core did so. New requests are refused meanwhile.

        Level 1 keeps the weights on the host, level 2 has them read from the checkpoint again. Requests cannot be kept.
        """
        self._admission.state = "asleep"
        await self._engine.call("thaw")
        await self._quiet(mode == "abort")
        is_asleep = await self._engine.call("sleep" if level == 1 else "discard")
        if not is_asleep:
            await self.resume()
        self._board.sleep_level = level if is_asleep else 0
        return is_asleep

    async def wake_up(self) -> None:
        """Load the device's memory again."""
        await self._engine.call("wake_up")
        self._board.sleep_level = 0
        await self.resume()
