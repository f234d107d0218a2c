"""Pages in host memory: the bytes behind `HostTier`, copied from and to the device without holding up its steps."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.ragged_paged_attention import PageContent
from paxserve.engine.disk_tier import DiskTier


class _Arrival(NamedTuple):
    """Pages on their way to host memory."""

    slots: Sequence[int]
    content: PageContent
    keys: Sequence[bytes]
    epoch: int


class HostPages:
    """Room for the content of `num_slots` pages.

    The operating system gives memory as slots are first written to.
    """

    def __init__(self, num_slots: int, page: PageContent, disk: DiskTier | None = None) -> None:
        """`page` describes the content of some pages; the first axis does not matter. `disk` gets all that comes."""
        self._content: Any = jax.tree.map(lambda leaf: np.empty((num_slots, *leaf.shape[1:]), leaf.dtype), page)
        self._arriving: deque[_Arrival] = deque()
        self._disk = disk

    def put(self, slots: Sequence[int], content: PageContent, keys: Sequence[bytes] = ()) -> None:
        """Take the first pages of `content`, which the device may still be computing, into the slots."""
        for leaf in jax.tree.leaves(content):
            leaf.copy_to_host_async()
        self._arriving.append(_Arrival(slots, content, keys, 0 if self._disk is None else self._disk.epoch))
        self.settle()

    def settle(self) -> None:
        """Store what has come meanwhile."""
        while self._arriving and all(leaf.is_ready() for leaf in jax.tree.leaves(self._arriving[0].content)):
            self._settle()

    def get(self, slots: Sequence[int], count: int) -> PageContent:
        """The content of the slots, waiting for it if it is still on its way, and anything up to `count` pages."""
        while any(not set(slots).isdisjoint(arriving.slots) for arriving in self._arriving):
            self._settle()
        indices = np.zeros(count, np.intp)
        indices[: len(slots)] = slots
        return jax.tree.map(lambda held: held[indices], self._content)

    def _settle(self) -> None:
        """Store what came first."""
        slots, content, keys, epoch = self._arriving.popleft()
        pages = jax.tree.map(lambda leaf: np.asarray(leaf)[: len(slots)], content)

        def store(held: np.ndarray, leaf: np.ndarray) -> None:
            held[np.asarray(slots, np.intp)] = leaf

        jax.tree.map(store, self._content, pages)
        if self._disk is not None:
            for index, key in enumerate(keys):
                self._disk.keep(key, [_bytes_of(leaf[index]) for leaf in jax.tree.leaves(pages)], epoch)

    def unpack(self, pages: Sequence[bytes], count: int) -> PageContent:
        """The content of pages from disk, and anything up to `count` pages."""
        leaves, start = [], 0
        for held in jax.tree.leaves(self._content):
            size = held[0].nbytes
            leaf = np.zeros((count, *held.shape[1:]), held.dtype)
            for index, page in enumerate(pages):
                leaf[index] = np.frombuffer(page, held.dtype, held[0].size, start).reshape(held.shape[1:])
            leaves.append(leaf)
            start += size
        return jax.tree.unflatten(jax.tree.structure(self._content), leaves)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
