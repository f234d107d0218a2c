"""The compiled programs of an engine: those a start waits for, and those that may come after.

Compiling runs in threads, never on the step's own. A step takes the smallest program that fits it and is
compiled, and waits only if there is none.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from paxserve.engine.program_cache import ProgramCache

logger = logging.getLogger(__name__)

Jobs = Mapping[Hashable, Callable[[], Any]]

MAX_WORKERS = 4
"""Programs compiled at once: each takes some hundred megabytes while it is."""


class Programs:
    """Compiled programs by key."""

    def __init__(self, cache: ProgramCache, needed: Jobs, later: Jobs) -> None:
        """Compile (or load) the `needed` programs before returning, and `later` ones in the background."""
        started = time.perf_counter()
        queue = deque((key, partial(cache.get, repr(key), job)) for key, job in (*needed.items(), *later.items()))
        self._futures: dict[Hashable, Future[Any]] = {key: Future() for key, _ in queue}
        for number in range(min(MAX_WORKERS, os.cpu_count() or 1)):
            threading.Thread(target=_work, args=(queue, self._futures), name=f"compile-{number}").start()
        for key in needed:
            self._futures[key].result()
        seconds = time.perf_counter() - started
        logger.info("%d programs in %.1f s, %d of them kept from before", len(needed), seconds, cache.num_loaded)

    def __getitem__(self, key: Hashable) -> Any:
        """The program, waited for if it is still being compiled."""
        return self._futures[key].result()

    def choose(self, keys: Sequence[Hashable]) -> Any:
        """The first of these keys whose program is compiled; if none is, the first one."""
        return next((key for key in keys if self._futures[key].done()), keys[0])

    def __len__(self) -> int:
        """Programs that are compiled."""
        return sum(future.done() for future in self._futures.values())

    def wait(self) -> None:
        """Return once every program is compiled."""
        for future in self._futures.values():
            future.result()


def _work(queue: deque[tuple[Hashable, Callable[[], Any]]], futures: Mapping[Hashable, Future[Any]]) -> None:
    """Compile what is queued; what is still queued when the program ends is left, so that nobody waits for it."""
    main = threading.main_thread()
    while main.is_alive():
        try:
            key, job = queue.popleft()
        except IndexError:
            return
        try:
            futures[key].set_result(job())
        except BaseException as error:  # whoever asks for the program gets it
            futures[key].set_exception(error)
