"""The compiled programs of an engine: those a start waits for, and those that may come after.

Compiling runs in threads, never on the step's own. A step takes the smallest program that fits it and is
compiled, and waits only if there is none.
"""

import logging
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        executor = ThreadPoolExecutor(min(MAX_WORKERS, os.cpu_count() or 1), thread_name_prefix="compile")
        self._futures: dict[Hashable, Future[Any]] = {
            key: executor.submit(cache.get, repr(key), job) for key, job in (*needed.items(), *later.items())
        }
        executor.shutdown(wait=False)
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
