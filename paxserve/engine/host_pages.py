"""Pages in host memory: the bytes behind `HostTier`, copied from and to the device without holding up its steps."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.ragged_paged_attention import PageContent


class HostPages:
    """Room for the content of `num_slots` pages.

    The operating system gives memory as slots are first written to.
    """

    def __init__(self, num_slots: int, page: PageContent) -> None:
        """`page` describes the content of some pages; the first axis does not matter."""
        self._content: Any = jax.tree.map(lambda leaf: np.empty((num_slots, *leaf.shape[1:]), leaf.dtype), page)
        self._arriving: deque[tuple[Sequence[int], PageContent]] = deque()

    def put(self, slots: Sequence[int], content: PageContent) -> None:
        """Take the first pages of `content`, which the device may still be computing, into the slots."""
        for leaf in jax.tree.leaves(content):
            leaf.copy_to_host_async()
        self._arriving.append((slots, content))
        while self._arriving and all(leaf.is_ready() for leaf in jax.tree.leaves(self._arriving[0][1])):
            self._settle()

    def get(self, slots: Sequence[int], count: int) -> PageContent:
        """The content of the slots, waiting for it if it is still on its way, and anything up to `count` pages."""
        while any(not set(slots).isdisjoint(arriving) for arriving, _ in self._arriving):
            self._settle()
        indices = np.zeros(count, np.intp)
        indices[: len(slots)] = slots
        return jax.tree.map(lambda held: held[indices], self._content)

    def _settle(self) -> None:
        """Store what came first."""
        slots, content = self._arriving.popleft()

        def store(held: np.ndarray, leaf: jax.Array) -> None:
            held[np.asarray(slots, np.intp)] = np.asarray(leaf)[: len(slots)]

        jax.tree.map(store, self._content, content)
