"""Steps in which every running request computes one token more than in the step before, and nothing else happens.

Most steps of a busy engine are of this kind. What they need to know is kept in arrays, which such a step moves on by
one, so that it costs the host little more than to hand each request its token.
"""

from typing import Self

import numpy as np

from paxserve.engine.request import Request
from paxserve.engine.step_plan import ScheduledRow


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
        self.num_left = min(request.most_tokens - request.num_tokens for request in requests)
        """Steps until the first of them reaches its length."""
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

    @property
    def can_go_on(self) -> bool:
        """Whether none of them has come to its length."""
        return self.age < self.num_left

    def on_page_border(self, age: int) -> list[Request]:
        """The requests of whose tokens a whole number of pages is computed at this age."""
        return self._by_phase[age % self._page_size]


class DecodeStep:
    """One step of a `DecodeSet`: what a `ScheduledStep` is, without an object for each row."""

    page_copies: tuple[tuple[int, int], ...] = ()
    """No row writes to a page that others read."""

    def __init__(self, decodes: DecodeSet) -> None:
        self.decodes = decodes
        self.age = decodes.age
        # Whatever was planned before the set was made, the device's table knows it after the first step.
        self.changed = decodes.on_page_border(self.age) if self.age else decodes.requests
        """Requests whose pages, or more of them, the device may not know yet."""
        self.page_saves: list[tuple[int, int]] = []
        self.page_loads: list[tuple[int, int]] = []

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.decodes.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return len(self.decodes.requests)

    @property
    def starts(self) -> np.ndarray:
        """Tokens of each row computed before this step."""
        return self.decodes.starts + self.age

    @property
    def tokens(self) -> np.ndarray:
        """What each row computes: all sampled by the step before but in the first one."""
        return -1 - self.decodes.slots if self.age else self.decodes.first_tokens

    @property
    def rows(self) -> list[ScheduledRow]:
        """The step spelled out, as for steps of any other kind."""
        places = zip(self.decodes.requests, self.starts.tolist(), self.decodes.positions.tolist(), strict=True)
        return [ScheduledRow(request, start, 1, True, position + self.age) for request, start, position in places]

    @property
    def is_last(self) -> bool:
        """Whether some row samples its last token in this step."""
        return self.age + 1 >= self.decodes.num_left


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


def _next_token(request: Request) -> int:
    start, token_ids = request.num_computed, request.token_ids
    return token_ids[start] if start < len(token_ids) else -1 - request.slot
