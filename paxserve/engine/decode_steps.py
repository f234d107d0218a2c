"""Steps in which every running request computes one token more than in the step before, and nothing else happens.

Most steps of a busy engine are of this kind. What they need to know is kept in arrays, which such a step moves on by
one, so that it costs the host little more than to hand each request its token. Several of them may be one program
(`multi_step`): then each request moves on by as many tokens at once.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Self

import numpy as np

from paxserve.engine.page_tables import PageTables
from paxserve.engine.request import Request
from paxserve.engine.step_plan import ScheduledRow, StepPlan
from paxserve.messages import DecodedTokens

NUM_STOP_IDS = 8
"""Stop tokens of one request that a program of several steps can look out for."""


class DecodeSet:
    """The requests that decode together until one joins or leaves; `age` counts the tokens each has computed since."""

    def __init__(self, requests: list[Request], page_size: int) -> None:
        """All of them have a single token to compute, and room for one more after it."""
        self.requests = requests
        self.request_ids = [request.request_id for request in requests]
        self.indices = [request.index for request in requests]
        self.age = 0
        self.slots = np.array([request.slot for request in requests], np.int32)
        self.first_tokens = np.array([_next_token(request) for request in requests], np.int32)
        """What the first step computes; a token that is still on the device is named by its slot, as -1 - slot."""
        self.starts = np.array([request.num_computed for request in requests], np.int32)
        """Tokens computed before the first step."""
        self.positions = np.array([request.output_len for request in requests], np.int32)
        """Output positions of the tokens that the first step samples."""
        self.num_left = np.array([_num_left(request) for request in requests], np.int32)
        """Tokens until each of them reaches its length."""
        self.least_left = int(self.num_left.min())
        self.stop_ids: frozenset[int] = frozenset().union(*(request.stop_token_ids for request in requests))
        self._page_size = page_size
        self._by_phase: list[list[Request]] = [[] for _ in range(page_size)]
        for request, start in zip(requests, self.starts.tolist(), strict=True):
            self._by_phase[-start % page_size].append(request)

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def of(cls, running: list[Request], page_size: int) -> Self | None:
        """The set of all running requests, if they can decode without anything to decide."""
        # Whoever is not that far has mostly come last.
        return cls(list(running), page_size) if running and all(map(_only_decodes, reversed(running))) else None

    @cached_property
    def can_run_ahead(self) -> bool:
        """Whether what ends them, but for the front's wishes, can be seen on the device."""
        return all(
            len(request.stop_token_ids) <= NUM_STOP_IDS
            and not request.params.stop
            and request.params.repetition_detection is None
            for request in self.requests
        )

    @cached_property
    def stop_table(self) -> np.ndarray:
        """[R, NUM_STOP_IDS]: each request's stop tokens, and -1 where it has fewer."""
        table = np.full((len(self), NUM_STOP_IDS), -1, np.int32)
        for row, request in zip(table, self.requests, strict=True):
            row[: len(request.stop_token_ids)] = list(request.stop_token_ids)
        return table

    def next_step(self, tables: PageTables, most: int = 1) -> "DecodeStep | None":
        """The step that moves all of them on, by `most` tokens if their lengths and the free pages allow it.

        None if a request has come to its length, or is without a page even for one token.
        """
        if self.age >= self.least_left:
            return None
        count = self._num_affordable(tables, most) if most > 1 else 1
        unused = StepPlan(0)
        for request in self._on_page_border(self.age, count):
            if tables.is_limited:
                tables.give_back(request)
            if not tables.grow(request, request.num_computed + min(count, _num_left(request)), unused):
                return None
        step = DecodeStep(self, count)
        if self.age + count <= self.least_left:
            for request in self.requests:
                request.num_computed += count
                request.num_pending += count
        else:
            for request, number in zip(self.requests, step.counts.tolist(), strict=True):
                request.num_computed += number
                request.num_pending += number
        for request in self._on_page_border(self.age + 1):
            if request.num_pending <= count:  # the steps before have been read; else pages are entered when they are
                tables.cache_full_pages(request, len(request.token_ids) - 1)
        self.age += count
        return step

    def take_in(self, step: "DecodeStep", new_token_ids: list[list[int]], tables: PageTables) -> DecodedTokens:
        """Add the tokens of a step in which none of the requests ends."""
        count = step.count
        for request, tokens in zip(self.requests, new_token_ids, strict=True):
            request.num_pending -= count
            request.token_ids += tokens
        for request in self._on_page_border(step.age + 2, count):  # one token more is known than is computed
            tables.cache_full_pages(request, len(request.token_ids) - count)
        return DecodedTokens(self.request_ids, self.indices, new_token_ids)

    def _on_page_border(self, age: int, count: int = 1) -> Iterator[Request]:
        """The requests of whose tokens a whole number of pages is computed at this age, or at one of the next ones."""
        for phase in range(age, age + min(count, self._page_size)):
            yield from self._by_phase[phase % self._page_size]

    def _num_affordable(self, tables: PageTables, most: int) -> int:
        """So many tokens, or as many as there are pages for, at least one; none beyond the last request's length."""
        pool = tables.pool
        most = min(most, int(self.num_left.max()) - self.age)
        while most > 1:
            missing = sum(
                pool.pages_for(request.num_computed + min(most, _num_left(request))) - len(request.pages)
                for request in self._on_page_border(self.age, most)
            )
            if missing * tables.num_groups <= pool.num_free:
                break
            most //= 2
        return max(1, most)


class DecodeStep:
    """One step of a `DecodeSet`: what a `ScheduledStep` is, without an object for each row."""

    page_copies: tuple[tuple[int, int], ...] = ()
    """No row writes to a page that others read."""
    page_fills: tuple[tuple[bytes, int], ...] = ()
    """No request begins."""

    def __init__(self, decodes: DecodeSet, count: int) -> None:
        self.decodes = decodes
        self.age = decodes.age
        self.count = count
        """Tokens that a row computes, unless it ends before."""
        # Whatever was planned before the set was made, the device's table knows it after the first step.
        self.changed = list(decodes._on_page_border(self.age, count)) if self.age else decodes.requests
        """Requests whose pages, or more of them, the device may not know yet."""
        self.page_saves: list[tuple[int, int, bytes]] = []
        self.page_loads: list[tuple[int, int]] = []

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.decodes)

    @property
    def counts(self) -> np.ndarray:
        """Tokens that each row computes unless it meets a stop token."""
        return np.minimum(self.num_left, self.count)

    @property
    def num_left(self) -> np.ndarray:
        """Tokens that each row may still compute."""
        return self.decodes.num_left - self.age

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return self.num_rows if self.count == 1 else int(self.counts.sum())

    @property
    def starts(self) -> np.ndarray:
        """Tokens of each row computed before this step."""
        return self.decodes.starts + self.age

    @property
    def tokens(self) -> np.ndarray:
        """What each row computes first: all sampled by the step before but in the set's first one."""
        return -1 - self.decodes.slots if self.age else self.decodes.first_tokens

    @property
    def rows(self) -> list[ScheduledRow]:
        """The step spelled out, as steps of any other kind are; only of one token a row."""
        assert self.count == 1
        places = zip(self.decodes.requests, self.starts.tolist(), self.decodes.positions.tolist(), strict=True)
        return [ScheduledRow(request, start, 1, True, position + self.age) for request, start, position in places]

    @property
    def is_last(self) -> bool:
        """Whether some row comes to its length in this step."""
        return self.age + self.count >= self.decodes.least_left


def _only_decodes(request: Request) -> bool:
    num_tokens = request.num_tokens
    return (
        num_tokens - request.num_computed == 1
        and num_tokens < request.most_tokens
        and not request.shares_last_page
        and not request.needs_host_tokens
        and request.group is None
        and not request.wants_prompt_logprobs
        and request.is_plain_at(request.output_len)
    )


def _num_left(request: Request) -> int:
    return request.most_tokens - request.num_tokens


def _next_token(request: Request) -> int:
    start, token_ids = request.num_computed, request.token_ids
    return token_ids[start] if start < len(token_ids) else -1 - request.slot
