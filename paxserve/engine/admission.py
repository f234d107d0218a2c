"""Whether a new request may begin: not while the engine sleeps or the server stops, later while it is paused, and not
when too many wait already."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from paxserve.errors import RequestError
from paxserve.messages import EngineRequest

State = Literal["open", "paused", "asleep", "draining"]

REFUSALS: dict[State, str] = {
    "asleep": "The engine is asleep (/wake_up ends that).",
    "draining": "The server is shutting down.",
}
UNAVAILABLE = 503
TOO_MANY = 429
"""What a full queue answers: OpenAI's clients raise it as `RateLimitError`, and try again by themselves."""


class Admission:
    """Counts the requests that have been given to the engine and not been heard of since: those that wait."""

    def __init__(
        self,
        *,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        full_code: int = TOO_MANY,
        on_refusal: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._max_requests, self._max_tokens, self._on_refusal = max_requests, max_tokens, on_refusal
        self._full_code = full_code
        self._waiting: dict[str, int] = {}
        self._state: State = "open"
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        """What becomes of new requests."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Return when requests may begin. Raises `RequestError` (503) in states that do not end by themselves."""
        while self._state == "paused":
            await self._changed.wait()
        if self._state in REFUSALS:
            raise RequestError(REFUSALS[self._state], code=UNAVAILABLE)

    def admit(self, requests: Sequence[EngineRequest]) -> None:
        """Count these requests as waiting. Raises `RequestError` when the queue has no room for all of them."""
        if self._state in REFUSALS:
            raise RequestError(REFUSALS[self._state], code=UNAVAILABLE)
        count, tokens = len(requests), sum(len(request.prompt_token_ids) for request in requests)
        self._check("max_num_queued_reqs", len(self._waiting), count, self._max_requests)
        self._check("max_num_queued_tokens", sum(self._waiting.values()), tokens, self._max_tokens)
        self._waiting |= {request.request_id: len(request.prompt_token_ids) for request in requests}

    def release(self, request_id: str) -> None:
        """This request does not wait any more."""
        self._waiting.pop(request_id, None)

    def _check(self, reason: str, queued: int, new: int, limit: int | None) -> None:
        # A request that finds the queue empty is taken however large it is: it would never fit otherwise.
        if limit is None or queued == 0 or queued + new <= limit:
            return
        self._on_refusal(reason)
        raise RequestError(
            f"The server is overloaded: {queued} of {limit} are queued ({reason}). Try again later.",
            code=self._full_code,
        )
