"""Which full KV pages hold which token prefixes: a hash chain over pages.

The hash of a page covers its tokens and the hash of the page before it, so equal hashes mean equal
prefixes (vLLM, "Automatic Prefix Caching"). Only full pages are ever shared, and a full page is never written again.
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(cache_salt: str | None, *extra_keys: str) -> bytes:
    """The hash every chain of this salt starts from; `extra_keys` name what else KV depends on (adapter, images)."""
    seed = "\0".join((cache_salt or "", *extra_keys))
    return hashlib.blake2b(seed.encode(), digest_size=DIGEST_BYTES, person=b"paxserve-root").digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full page holding `tokens` after the prefix that `parent` stands for."""
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=DIGEST_BYTES, key=parent).digest()


class PrefixCache:
    """The map between page hashes and the pages that hold that content.

    Two requests that compute the same prefix at the same time fill two pages with it. Both are kept, so that the hash
    is found for as long as one of them is there.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._copies_of: dict[bytes, list[int]] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix of `hashes` that is cached."""
        pages = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def page_of(self, digest: bytes) -> int | None:
        """A page with this content."""
        return self._page_of.get(digest)

    def insert(self, digest: bytes, page: int) -> None:
        """Record that `page` now holds the content of `digest`."""
        if page in self._hash_of:
            return
        self._hash_of[page] = digest
        if self._page_of.setdefault(digest, page) != page:
            self._copies_of.setdefault(digest, []).append(page)

    def forget(self, page: int) -> None:
        """Drop the page's entry, because it is about to be overwritten; a copy of it takes its place."""
        digest = self._hash_of.pop(page, None)
        if digest is None:
            return
        copies = self._copies_of.get(digest)
        if copies is None:
            del self._page_of[digest]
            return
        if self._page_of[digest] == page:
            self._page_of[digest] = copies.pop(0)
        else:
            copies.remove(page)
        if not copies:
            del self._copies_of[digest]

    def holds(self, page: int) -> bool:
        """Whether the page's content can be found by hash."""
        return page in self._hash_of

    def hash_of(self, page: int) -> bytes | None:
        """The hash under which the page can be found, if any."""
        return self._hash_of.get(page)

    def clear(self) -> None:
        """Forget everything."""
        self._page_of.clear()
        self._copies_of.clear()
        self._hash_of.clear()

    def check_integrity(self) -> None:
        """Assert that both directions of the map agree."""
        listed = [(page, digest) for digest, page in self._page_of.items()]
        listed += [(page, digest) for digest, pages in self._copies_of.items() for page in pages]
        assert len(listed) == len(self._hash_of), "a page is listed twice, or not at all"
        assert dict(listed) == self._hash_of, "a page is listed under another hash than its own"
