"""The page pool: which KV pages are free, which are held and by how many requests.

A page nobody holds keeps its content, and its entry in the prefix cache, until it is handed out
again; the least recently freed page goes first.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from models.layer_groups import Reach, pages_for
from paxserve.engine.disk_tier import DiskTier
from paxserve.engine.host_tier import HostTier
from paxserve.engine.prefix_cache import PrefixCache
from paxserve.errors import OutOfPages


class PagePool:
    """Reference counts and the free list of `num_pages` pages of `page_size` tokens each."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool = True,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        reaches: Sequence[Reach] = (Reach(),),
    ) -> None:
        """`reaches` are those of the groups of layers that the pages are shared out to."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.reaches = tuple(reaches)
        self.prefix_cache = PrefixCache() if enable_prefix_caching else None
        self.host = host
        self.disk = disk
        self._ref_counts = [0] * num_pages
        # Ordered by when a page was freed: the front is evicted first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))

    @property
    def num_host_slots(self) -> int:
        """Evicted pages that host memory has room for."""
        return 0 if self.host is None else self.host.num_slots

    @property
    def num_free(self) -> int:
        """Pages that no request holds, cached ones included."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """Pages that at least one request holds."""
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def most_tokens(self, limit: int, num_new: int) -> int:
        """The longest sequence of up to `limit` tokens that can grow by steps of `num_new` with the pool to itself."""

        def num_needed(num_tokens: int) -> int:
            return pages_for(self.reaches, num_tokens, self.page_size, num_new)

        return bisect_right(range(limit + 1), self.num_pages, key=num_needed) - 1

    def ref_count(self, page: int) -> int:
        """How many requests hold the page."""
        return self._ref_counts[page]

    def allocate(self, count: int) -> list[int]:
        """`count` fresh pages, each held once. Raises `OutOfPages`, taking none, if there are too few."""
        if count > len(self._free):
            raise OutOfPages
        pages = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            if self.prefix_cache is not None:
                self._evict(page, self.prefix_cache)
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def _evict(self, page: int, cache: PrefixCache) -> None:
        digest = cache.hash_of(page)
        cache.forget(page)
        if self.host is not None and digest is not None and not cache.find([digest]):
            self.host.keep(digest, page)

    def hold(self, pages: Iterable[int]) -> None:
        """Add one holder to each page, taking it off the free list if it was there."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._free[page]
            self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder of each page; a page without holders becomes free.

        The last pages of a sequence are freed first, so that eviction eats a cached prefix from its end
        and never leaves an unreachable tail; pages without reusable content go before all others.
        """
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, f"page {page} released more often than held"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free[page] = None
                if self.prefix_cache is None or not self.prefix_cache.holds(page):
                    self._free.move_to_end(page, last=False)

    def must_copy(self, page: int) -> bool:
        """Whether a request that holds this page may not write to it: others read it, or find it by its hash."""
        return self._ref_counts[page] > 1 or (self.prefix_cache is not None and self.prefix_cache.holds(page))

    def num_free_among(self, pages: Sequence[int]) -> int:
        """How many of these pages are on the free list: holding them leaves fewer to allocate."""
        return sum(1 for page in pages if self._ref_counts[page] == 0)

    def reset_prefix_cache(self, *, keeps_disk: bool = False) -> None:
        """Forget all cached content, but perhaps what is on disk; pages in use stay with their requests."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        if self.host is not None:
            self.host.clear()
        if self.disk is not None and not keeps_disk:
            self.disk.clear()

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the counts are exactly what the given page lists (one a request) add up to."""
        expected = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), f"a request holds a page twice: {pages}"
            for page in pages:
                expected[page] += 1
        assert expected == self._ref_counts, "reference counts differ from what requests hold"
        free = [page for page, count in enumerate(expected) if count == 0]
        assert sorted(self._free) == free, "the free list differs from the pages nobody holds"
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        if self.host is not None:
            self.host.check_integrity()
