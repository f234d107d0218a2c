"""Ctrl-C that waits for the end of a step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Makes Ctrl-C wait for the end of a step, so that it never cuts one in two; a second one does not wait.

    Only in the main thread and only where Python's own handler is in place.
    """
    is_set = threading.Event()
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield is_set.is_set
        return

    def handle(number: int, frame: Any) -> None:
        if is_set.is_set():
            signal.default_int_handler(number, frame)
        is_set.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield is_set.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_set.is_set():
        # It came with the last step: the caller still wanted to stop.
        raise KeyboardInterrupt
