"""The page tables of requests: pages found again, shared, given, and given back once no query sees them any more.

A request has a table for each group of layers (`models.layer_groups`), all equally long: entry i is the page with the
keys and values of the i-th `page_size` tokens for those layers, or `NO_PAGE` where they are out of sight.
"""

from collections.abc import Sequence
from typing import NamedTuple

from models.layer_groups import Reach
from paxserve.engine.disk_tier import Fetch
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import Request, Status
from paxserve.engine.step_plan import StepPlan
from paxserve.engine.waiting_queue import rank_of
from paxserve.errors import OutOfPages

NO_PAGE = -1


class Found(NamedTuple):
    """What a request need not compute."""

    num_tokens: int
    tables: list[list[int]]
    """Pages on the device, for each group; the last may be partly filled."""
    firsts: list[int]
    """For each kind of group, the first page that its layers still see."""
    loads: list[tuple[int, int, bytes]]
    """(group, place in its table, key) of pages that come from host memory or disk."""

    @property
    def pages(self) -> list[int]:
        """All the pages on the device."""
        return [page for table in self.tables for page in table if page != NO_PAGE]

    @property
    def num_loaded_pages(self) -> int:
        """Places in the tables that something is loaded for."""
        return len({place for _, place, _ in self.loads})


class PageTables:
    """Gives requests the pages of a pool, a table for each group of layers."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.num_groups = len(pool.reaches)
        kinds: dict[Reach, list[int]] = {}
        for group, reach in enumerate(pool.reaches):
            kinds.setdefault(reach, []).append(group)
        # Groups of a kind see equally far: they take and give back pages together.
        self._kinds = list(kinds.items())
        self._sees_all = [group for reach, groups in self._kinds if not reach.is_limited for group in groups]
        self.is_limited = any(reach.is_limited for reach in kinds)
        """Whether `give_back` has anything to do."""
        self._fetches: dict[Request, Fetch] = {}
        """What is being read from disk for requests that wait."""
        # The hash of some tokens stands for a page in each group; nothing is added where there is one group.
        self._suffixes = [bytes([group]) if self.num_groups > 1 else b"" for group in range(self.num_groups)]

    # What need not be computed

    def find(self, request: Request) -> Found:
        """Pages that hold the start of the request, but for its last token: that is computed for its logits."""
        leader = request.leader
        if leader is not None and leader.status is Status.RUNNING and leader.num_computed >= leader.prompt_len:
            shared = self._shared_with(leader, request.prompt_len - 1)
            if shared is not None:
                return shared
        if self.pool.prefix_cache is None or request.wants_prompt_logprobs:
            return self._found(0)
        page_size = self.pool.page_size
        hashes = request.page_hashes((request.num_tokens - 1) // page_size, page_size)
        while True:
            found = self._cached(hashes, self._num_known(hashes))
            excess = len(self._on_disk(found)) - (self.pool.disk.most_fetched if self.pool.disk else 0)
            if excess <= 0:
                return found
            # More than may be read for one request at once: make do with a shorter beginning.
            hashes = hashes[: found.num_tokens // page_size - -(-excess // self.num_groups)]

    def _cached(self, hashes: list[bytes], count: int) -> Found:
        """Where the first `count` pages are, as far as they are still seen; all of them are known."""
        cache = self.pool.prefix_cache
        assert cache is not None
        found = self._found(count * self.pool.page_size)
        for (_, groups), first in zip(self._kinds, found.firsts, strict=True):
            for group in groups:
                table, suffix = found.tables[group], self._suffixes[group]
                for place in range(first, count):
                    page = cache.page_of(hashes[place] + suffix)
                    if page is None:
                        found.loads.append((group, place, hashes[place] + suffix))
                        page = NO_PAGE
                    table.append(page)
        return found

    def _found(self, num_tokens: int) -> Found:
        """What sees nothing of so many tokens: the places that are out of sight."""
        page_size = self.pool.page_size
        firsts = [reach.first_seen(num_tokens) // page_size for reach, _ in self._kinds]
        tables: list[list[int]] = [[] for _ in range(self.num_groups)]
        for (_, groups), first in zip(self._kinds, firsts, strict=True):
            for group in groups:
                tables[group] = [NO_PAGE] * first
        return Found(num_tokens, tables, firsts, [])

    def _shared_with(self, leader: Request, num_tokens: int) -> Found | None:
        """The leader's pages of so many tokens, unless it has given back some that are wanted."""
        found, stop = self._found(num_tokens), self.pool.pages_for(num_tokens)
        if any(gone > first for gone, first in zip(leader.first_pages, found.firsts, strict=True)):
            return None
        for own, table in zip(found.tables, leader.tables, strict=True):
            own += table[len(own) : stop]
        return found

    def _num_known(self, hashes: list[bytes]) -> int:
        """The most pages after which a request can go on: what its layers then see is on the device or the host."""
        count = 0 if self._sees_all else len(hashes)
        while self._sees_all and count < len(hashes) and self._is_known(hashes[count], self._sees_all):
            count += 1
        gap: int | None = count
        while count and gap is not None:
            gap = self._last_gap(hashes, count)
            # Whoever went on between the gap and here would see the gap as well.
            count = count if gap is None else gap
        return count

    def _last_gap(self, hashes: list[bytes], count: int) -> int | None:
        """A page that is not known although some layers see it from the end of `count` pages."""
        page_size = self.pool.page_size
        for reach, groups in self._kinds:
            if reach.is_limited:
                first = reach.first_seen(count * page_size) // page_size
                for place in range(count - 1, first - 1, -1):
                    if not self._is_known(hashes[place], groups):
                        return place
        return None

    def _is_known(self, digest: bytes, groups: list[int]) -> bool:
        cache, host, disk = self.pool.prefix_cache, self.pool.host, self.pool.disk
        assert cache is not None
        for group in groups:
            key = digest + self._suffixes[group]
            if cache.page_of(key) is None and (host is None or key not in host) and (disk is None or key not in disk):
                return False
        return True

    # What must be read from disk first

    def _on_disk(self, found: Found) -> list[bytes]:
        """What is neither on the device nor in host memory."""
        host = self.pool.host
        return [key for _, _, key in found.loads if host is None or key not in host]

    def is_at_hand(self, request: Request, found: Found) -> bool:
        """Whether all that was found can be used now; if not, the rest of it is being read, or waits for its turn."""
        if self.pool.disk is None or not (keys := self._on_disk(found)):
            return True
        fetch = self.pool.disk.fetch(keys, self._fetches.get(request))
        if fetch is None:
            last = max(self._fetches, key=rank_of)
            if last.rank < request.rank:
                return False
            # Else those that others have overtaken would hold up the ones that they themselves wait for.
            self.forget(last)
            fetch = self.pool.disk.fetch(keys, None)
            assert fetch is not None
        self._fetches[request] = fetch
        # What turns out to be damaged is not found the next time.
        return fetch.is_done and all(fetch.content(key) is not None for key in keys)

    def forget(self, request: Request) -> None:
        """Nothing needs to be read for this request any more."""
        if fetch := self._fetches.pop(request, None):
            assert self.pool.disk is not None
            self.pool.disk.end(fetch)

    def reset(self, *, keeps_disk: bool = False) -> None:
        """Forget all cached content, but perhaps what is on disk, while no request runs."""
        for request in list(self._fetches):
            self.forget(request)
        self.pool.reset_prefix_cache(keeps_disk=keeps_disk)

    # Pages for a request

    def has_room(self, found: Found, num_tokens: int) -> bool:
        """Whether a request with this start can be given pages for `num_tokens` tokens."""
        pool = self.pool
        known = found.pages
        is_partial = found.num_tokens % pool.page_size > 0
        places = pool.pages_for(num_tokens) - pool.pages_for(found.num_tokens) + is_partial
        missing = places * self.num_groups + len(found.loads)
        return missing <= pool.num_free - pool.num_free_among(known)

    def start(self, request: Request, found: Found, num_tokens: int, plan: StepPlan) -> None:
        """Give a request what was found for it, and pages for `num_tokens` tokens, which `has_room` has promised."""
        pool = self.pool
        pool.hold(found.pages)
        request.tables, request.first_pages = found.tables, found.firsts
        request.num_computed = found.num_tokens
        request.shares_last_page = found.num_tokens % pool.page_size > 0
        if found.loads:
            self._load(found, self._fetches.get(request))
        self.forget(request)
        has_pages = self.grow(request, num_tokens, plan)
        assert has_pages, "pages were counted wrongly"

    def _load(self, found: Found, fetch: Fetch | None) -> None:
        """Have pages brought back; later rows may already share them, as the step runs after that."""
        host, disk, cache = self.pool.host, self.pool.disk, self.pool.prefix_cache
        assert host is not None
        assert cache is not None
        kept = {key for _, _, key in found.loads if key in host}
        host.pin(list(kept))  # taking pages may put others into host memory
        for (group, place, key), page in zip(found.loads, self.pool.allocate(len(found.loads)), strict=True):
            found.tables[group][place] = page
            cache.insert(key, page)
            if key in kept:
                host.load(key, page)
                continue
            content = None if fetch is None else fetch.content(key)
            assert disk is not None
            assert content is not None, "a page was taken for one at hand"
            disk.fill(content, page)

    def grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Give the request the pages for `num_tokens` tokens, the next on pages of its own, if there are enough.

        A page that it shares with another choice of its request is copied before it is written to.
        """
        pool, tables = self.pool, request.tables
        place = request.num_computed // pool.page_size
        missing = max(0, pool.pages_for(num_tokens) - len(tables[0]))
        copied = [table for table in tables if pool.must_copy(table[place])] if request.shares_last_page else []
        if missing or copied:
            try:
                fresh = pool.allocate(missing * self.num_groups + len(copied))
            except OutOfPages:
                return False
            for table in copied:
                source, table[place] = table[place], fresh.pop()
                plan.copy_page(request, source, table[place])
                pool.release([source])
            request.num_page_changes += bool(copied)
            for group, table in enumerate(tables):
                table += fresh[group * missing : (group + 1) * missing]
        request.shares_last_page = False
        return True

    def fork(self, parent: Request, child: Request) -> None:
        """Let a new request go on from where another is, on the same pages until one of them writes."""
        stop = self.pool.pages_for(parent.num_computed)
        child.tables, child.first_pages = [table[:stop] for table in parent.tables], list(parent.first_pages)
        child.num_computed = parent.num_computed
        self.pool.hold(self.held_by(child))
        if parent.num_computed % self.pool.page_size:
            child.shares_last_page = parent.shares_last_page = True

    def cache_full_pages(self, request: Request, start: int) -> None:
        """Enter pages into the prefix cache that are full of known tokens, from the page of token `start` on."""
        cache, page_size = self.pool.prefix_cache, self.pool.page_size
        if cache is None:
            return
        full = min(request.num_computed, len(request.token_ids)) // page_size
        first = start // page_size
        if full <= first:
            return
        hashes = request.page_hashes(full, page_size)
        for table, suffix in zip(request.tables, self._suffixes, strict=True):
            for place in range(first, full):
                if table[place] != NO_PAGE:  # a short window may have passed a page before its tokens are read
                    cache.insert(hashes[place] + suffix, table[place])

    # Pages given back

    def give_back(self, request: Request) -> None:
        """Let go of what no later query of the request sees.

        It stays in the prefix cache until something else is written there. One more token than is needed is kept, so
        that another choice of the request can compute the prompt's last token again.
        """
        last = max(request.num_computed - 1, 0)
        for kind, (reach, groups) in enumerate(self._kinds):
            first, known = reach.first_seen(last) // self.pool.page_size, request.first_pages[kind]
            if first > known:
                request.first_pages[kind] = first
                tables = [request.tables[group] for group in groups]
                self.pool.release(_by_place(tables, known, first))
                for table in tables:
                    table[known:first] = [NO_PAGE] * (first - known)

    def release(self, request: Request) -> None:
        """Take all its pages from the request."""
        self.pool.release(self.held_by(request))
        request.tables = [[] for _ in range(self.num_groups)]
        request.first_pages = [0] * len(self._kinds)
        request.shares_last_page = False

    def held_by(self, request: Request) -> list[int]:
        """The pages that the request holds, those of a place in all tables side by side."""
        return _by_place(request.tables, 0, len(request.tables[0]))

    def num_unused_tokens(self, requests: Sequence[Request]) -> int:
        """Tokens that their pages have room for, over all groups, beyond those that are computed."""
        page_size = self.pool.page_size
        return self.num_groups * sum([len(r.tables[0]) * page_size - r.num_computed for r in requests])

    def check(self, request: Request) -> None:
        """Assert that a running request has the pages of all that it has computed and still sees, and no others."""
        page_size = self.pool.page_size
        for kind, (reach, groups) in enumerate(self._kinds):
            first = request.first_pages[kind]
            assert first <= reach.first_seen(request.num_computed) // page_size, "a page in sight was given back"
            for table in (request.tables[group] for group in groups):
                assert len(table) == len(request.tables[0]) >= self.pool.pages_for(request.num_computed)
                assert set(table[:first]) <= {NO_PAGE}
                assert NO_PAGE not in table[first:]


def _by_place(tables: list[list[int]], first: int, stop: int) -> list[int]:
    """The pages from one place to another, those of a place side by side: they are of no use without each other."""
    if len(tables) == 1 and (first == stop or tables[0][first] != NO_PAGE):
        return tables[0][first:stop]
    return [table[place] for place in range(first, stop) for table in tables if table[place] != NO_PAGE]
