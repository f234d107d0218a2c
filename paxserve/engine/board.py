"""What the fronts of a server must know of each other at any moment: a few numbers in memory that they share."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Literal, get_args

State = Literal["open", "paused", "asleep", "draining"]
STATES: tuple[State, ...] = get_args(State)

CELL_BYTES = 8


class Shared(IntEnum):
    """Cells of which there is one."""

    STATE = 0
    SLEEP_LEVEL = 1


class Count(IntEnum):
    """Cells of which every front has its own, which it alone writes."""

    WAITING = 0
    """Requests that were given to the engine and not heard of since."""
    WAITING_TOKENS = 1
    """Their prompts' tokens."""
    LOAD = 2
    """POST requests that are being answered."""


class Board:
    """The numbers, for the front at `place`: in the file at `path`, or in its own memory where it is the only one."""

    def __init__(self, path: Path | None = None, *, num_places: int = 1, place: int = 0) -> None:
        size = CELL_BYTES * (len(Shared) + num_places * len(Count))
        self._lock = -1
        if path is not None:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(self._lock, size)
        self._memory = mmap.mmap(self._lock, size)
        self._cells = memoryview(self._memory).cast("q")
        self._num_places = num_places
        self._own = self._place(place)

    @property
    def is_shared(self) -> bool:
        """Whether others can change it."""
        return self._lock >= 0

    @property
    def state(self) -> State:
        """What becomes of new requests."""
        return STATES[self._cells[Shared.STATE]]

    @state.setter
    def state(self, state: State) -> None:
        with self.locked():
            if self.state != "draining":  # a server that is told to stop does not begin again
                self._cells[Shared.STATE] = STATES.index(state)

    @property
    def sleep_level(self) -> int:
        """How deep the engine sleeps: 0 awake, 1 with its weights on the host, 2 without them."""
        return self._cells[Shared.SLEEP_LEVEL]

    @sleep_level.setter
    def sleep_level(self, level: int) -> None:
        self._cells[Shared.SLEEP_LEVEL] = level

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other front look and write at once. The system ends the lock of a front that dies."""
        if not self.is_shared:
            yield
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def add(self, count: Count, amount: int) -> None:
        """Add to this front's own count."""
        self._cells[self._own + count] += amount

    def total(self, count: Count) -> int:
        """The sum over all fronts."""
        return sum(self._cells[self._place(place) + count] for place in range(self._num_places))

    def clear(self, place: int) -> None:
        """Forget what the front at `place`, which has ended, had counted."""
        for count in Count:
            self._cells[self._place(place) + count] = 0

    def close(self) -> None:
        """Let go of the memory."""
        self._cells.release()
        self._memory.close()
        if self.is_shared:
            os.close(self._lock)
            self._lock = -1

    def _place(self, place: int) -> int:
        return len(Shared) + place * len(Count)
