"""Prompts that start alike and come at the same time: the first computes, the others wait for its pages."""

from collections.abc import Iterable

from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import Request


class PageWriters:
    """Which running prefill is about to fill which prompt page, by the page's hash."""

    def __init__(self, pool: PagePool, running: Iterable[Request]) -> None:
        self._page_size, self._is_cached = pool.page_size, pool.prefix_cache is not None
        self._writers: dict[bytes, Request] = {}
        for request in running:
            self.note(request)

    def note(self, request: Request) -> None:
        """The request runs: the page that its next token belongs to will be its work."""
        page = request.num_computed // self._page_size
        if self._is_cached and (page + 1) * self._page_size <= request.prompt_len:
            self._writers.setdefault(request.hash_of_page(page, self._page_size), request)

    def has_page_for(self, request: Request, num_computed: int) -> bool:
        """Whether a running request of lower rank is about to compute what this one needs first."""
        page = num_computed // self._page_size
        if not self._writers or request.wants_prompt_logprobs or (page + 1) * self._page_size >= request.num_tokens:
            return False
        writer = self._writers.get(request.hash_of_page(page, self._page_size))
        return writer is not None and writer.rank < request.rank
