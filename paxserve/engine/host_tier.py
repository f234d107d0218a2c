"""The second tier of the prefix cache: which pages evicted from the device are kept in host memory, and where.

The scheduler decides here; `host_pages` holds the bytes, and moves them in the order in which steps are launched.
"""

from collections import OrderedDict
from collections.abc import Sequence


class HostTier:
    """A least-recently-used map from page hashes to `num_slots` places in host memory."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Ordered by last use: the front is replaced first.
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._saves: list[tuple[int, int, bytes]] = []
        self._loads: list[tuple[int, int]] = []
        self._pinned: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    @property
    def pending_saves(self) -> list[tuple[int, int, bytes]]:
        """(page, slot, hash) of what the next step will save first."""
        return list(self._saves)

    def slot_of(self, digest: bytes) -> int:
        """Where a page is, or will be once it is saved."""
        return self._slot_of[digest]

    def keep(self, digest: bytes, page: int) -> None:
        """Have the content of `page`, which is about to be overwritten, saved ahead of the next step."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return
        if self._free:
            slot = self._free.pop()
        else:
            oldest = next((old for old in self._slot_of if old not in self._pinned), None)
            if oldest is None:
                return
            slot = self._slot_of.pop(oldest)
        self._slot_of[digest] = slot
        self._saves.append((page, slot, digest))

    def pin(self, hashes: Sequence[bytes]) -> None:
        """Keep these until the next step, whatever else is evicted."""
        self._pinned.update(hashes)

    def load(self, digest: bytes, page: int) -> None:
        """Have a pinned page's content put into `page` ahead of the next step."""
        self._slot_of.move_to_end(digest)
        self._loads.append((self._slot_of[digest], page))

    def take_moves(self) -> tuple[list[tuple[int, int, bytes]], list[tuple[int, int]]]:
        """(page, slot, hash) of what to save and (slot, page) of what to load since last time, in this order."""
        moves = self._saves, self._loads
        self._saves, self._loads, self._pinned = [], [], set()
        return moves

    def clear(self) -> None:
        """Forget everything; what was to be saved need not be."""
        assert not self._loads, "a request waits for its pages"
        self._free += self._slot_of.values()
        self._slot_of.clear()
        self._saves.clear()
        self._pinned.clear()

    def check_integrity(self) -> None:
        """Assert that every slot is either free or holds one page."""
        slots = [*self._free, *self._slot_of.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or listed twice"
