"""The third tier of the prefix cache: pages on disk, written and read by threads of their own.

What is saved into host memory is written here too. A request that needs pages from here waits in the queue while they
are read, and others pass it; then they go straight into its pages on the device.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from paxserve.engine.disk_folder import DiskFolder

NUM_READERS = 4
MOST_FETCHES = 4
"""Requests that pages are read for at once."""

MOST_PENDING = 512
"""Pages that wait to be written; what comes when there are so many is not kept here."""


class Fetch:
    """Pages that one request waits for, by what they are found by."""

    def __init__(self) -> None:
        self._reads: dict[bytes, Future[bytes | None]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._reads

    @property
    def reads(self) -> list["Future[bytes | None]"]:
        """The reads, done or not."""
        return list(self._reads.values())

    @property
    def is_done(self) -> bool:
        """Whether nothing is being read any more."""
        return all(read.done() for read in self._reads.values())

    def add(self, key: bytes, read: "Future[bytes | None]") -> None:
        """One page more to wait for."""
        self._reads[key] = read

    def content(self, key: bytes) -> bytes | None:
        """A page's bytes, once all are done; None if it was not there after all."""
        return self._reads[key].result() if key in self._reads else None


class DiskTier:
    """Decides nothing but what is still to be read or written; `DiskFolder` keeps the pages."""

    def __init__(
        self, folder: DiskFolder, *, most_fetched: int, num_fetches: int = MOST_FETCHES, num_pending: int = MOST_PENDING
    ) -> None:
        """`most_fetched` pages are read at most for one request, for `num_fetches` requests at once."""
        self.folder = folder
        self.most_fetched = most_fetched
        self._num_fetches = num_fetches
        self.epoch = 0
        """How often everything was forgotten: what was computed before that may not be written any more."""
        self._writer = ThreadPoolExecutor(1, "write-pages")
        self._readers = ThreadPoolExecutor(NUM_READERS, "read-pages")
        self._pending = threading.BoundedSemaphore(num_pending)
        self._fetches: list[Fetch] = []
        self._fills: list[tuple[bytes, int]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self.folder

    def keep(self, key: bytes, parts: Sequence[memoryview], epoch: int) -> None:
        """Have a page's bytes written, unless the disk cannot keep up. They must not change meanwhile."""
        # Also what is there already: it counts as used, behind whatever is still to be written.
        if epoch == self.epoch and self._pending.acquire(blocking=False):
            write = self._writer.submit(self.folder.write, key, parts)
            write.add_done_callback(lambda _: self._pending.release())

    def fetch(self, keys: Iterable[bytes], fetch: Fetch | None) -> Fetch | None:
        """Have pages read that are not part of the fetch yet; None if too much is being read already."""
        if fetch is None:
            if len(self._fetches) >= self._num_fetches:
                return None
            fetch = Fetch()
            self._fetches.append(fetch)
        for key in keys:
            if key not in fetch:
                fetch.add(key, self._readers.submit(self.folder.read, key))
        return fetch

    def end(self, fetch: Fetch) -> None:
        """Nobody waits for this any more."""
        self._fetches.remove(fetch)
        for read in fetch.reads:
            read.cancel()

    def wait(self, seconds: float) -> None:
        """Wait until some page has been read, for want of anything else to do."""
        reads = [read for fetch in self._fetches for read in fetch.reads if not read.done()]
        if reads:
            wait(reads, seconds, "FIRST_COMPLETED")

    def fill(self, content: bytes, page: int) -> None:
        """Have these bytes put into `page` ahead of the next step."""
        self._fills.append((content, page))

    def take_fills(self) -> list[tuple[bytes, int]]:
        """(bytes, page) of what to put into pages since last time."""
        fills, self._fills = self._fills, []
        return fills

    def clear(self) -> None:
        """Forget everything, also what is still to be written."""
        assert not self._fills, "a request waits for its pages"
        self.epoch += 1
        for fetch in list(self._fetches):
            self.end(fetch)
        self._writer.submit(self.folder.clear).result()

    def flush(self) -> None:
        """Wait until what was given to `keep` so far is written."""
        self._writer.submit(int).result()

    def close(self) -> None:
        """Write what is to be written, and let go of the folder."""
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)
        self.folder.close()
