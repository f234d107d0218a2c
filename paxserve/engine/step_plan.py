"""A step as the scheduler hands it out, what comes back from it, and the plan while it is put together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paxserve.engine.request import Request
from paxserve.messages import TokenLogprobs


@dataclass(slots=True)
class ScheduledRow:
    """One request's share of a step."""

    request: Request
    start: int
    """Tokens computed before this step."""
    num_tokens: int
    """Tokens computed in this step."""
    samples: bool
    """Whether the step computes the request's last token, so that a new one is sampled."""
    position: int
    """Output position of the sampled token."""


@dataclass(slots=True)
class ScheduledStep:
    """What one step computes: decode rows first, then longer ones."""

    rows: list[ScheduledRow]
    page_copies: list[tuple[int, int]]
    """(from, to): pages to copy, in this order, before the step runs."""
    page_saves: list[tuple[int, int, bytes]] = field(default_factory=list)
    """(page, slot, hash): pages to save into host memory before anything else, as they are about to be overwritten."""
    page_loads: list[tuple[int, int]] = field(default_factory=list)
    """(slot, page): pages to bring back from there, after the saves and before the copies."""
    page_fills: list[tuple[bytes, int]] = field(default_factory=list)
    """(bytes, page): pages that come from disk, at the same point."""

    @property
    def count(self) -> int:
        """How often the program's rows are computed."""
        return 1

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.rows)

    @property
    def changed(self) -> Iterable[Request]:
        """Requests of which the device may not know something yet."""
        return [row.request for row in self.rows]

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum([row.num_tokens for row in self.rows])


@dataclass(slots=True)
class RowResult:
    """What the device found for one row of a step."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a query token of the row: about the prompt token that follows it."""


class StepPlan:
    """What the next step will compute, as far as it is decided."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that may still be handed out."""
        self.counts: dict[Request, int] = {}
        self.num_partial = 0
        """Prompts that stay unfinished after this step."""
        self.num_long_partial = 0
        """Those of them that count as long."""
        self._copies: dict[Request, list[tuple[int, int]]] = {}

    def add(self, request: Request, count: int) -> None:
        """Have the request compute `count` tokens."""
        self.counts[request] = count
        self.budget -= count

    def copy_page(self, request: Request, source: int, target: int) -> None:
        """Have the request write to a copy of a page instead of the page itself."""
        self._copies.setdefault(request, []).append((source, target))

    def drop(self, request: Request) -> None:
        """Take back whatever was planned for the request: its pages are about to be another's."""
        self.budget += self.counts.pop(request, 0)
        self._copies.pop(request, None)

    @property
    def copies(self) -> Iterable[tuple[int, int]]:
        """(from, to) of the pages to copy ahead of the step."""
        return [copy for copies in self._copies.values() for copy in copies]
