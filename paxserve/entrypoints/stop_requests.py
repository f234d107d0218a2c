"""How a process is told to stop: once to end in good order, twice to be done at once."""

import asyncio
import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """Counts how often the process was asked to stop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.on_request: Callable[[int], None] = lambda count: None
        self._count = 0

    def ask(self) -> None:
        """Ask once more."""
        self._count += 1
        self.asked.set()
        self.on_request(self._count)

    def ignore(self) -> None:
        """Let nothing interrupt the rest, which is short."""
        self.on_request = lambda count: None


class StopSignals(StopRequests):
    """SIGTERM and SIGINT: the first asks to stop, the second insists."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.ask)

    def ignore(self) -> None:
        """The core is told to leave, and killed if it does not: that takes no second signal."""
        super().ignore()
        for number in STOP_SIGNALS:
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
