"""Whether a new request may begin: not while the engine sleeps or the server stops, later while it is paused, and not
when too many wait already."""

import asyncio
from collections.abc import Callable, Sequence

from paxserve.engine.board import Board, Count, State
from paxserve.errors import RequestError
from paxserve.messages import EngineRequest

REFUSALS: dict[State, str] = {
    "asleep": "The engine is asleep (/wake_up ends that).",
    "draining": "The server is shutting down.",
}
UNAVAILABLE = 503
TOO_MANY = 429
"""What a full queue answers: OpenAI's clients raise it as `RateLimitError`, and try again by themselves."""

LOOK_SECONDS = 0.05
"""How often a paused request looks whether another front has ended the pause."""


class Admission:
    """Counts the requests that have been given to the engine and not been heard of since: those that wait.

    State and counts stand on the board, so that the limits hold for all fronts of a server together.
    """

    def __init__(
        self,
        *,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        full_code: int = TOO_MANY,
        on_refusal: Callable[[str], None] = lambda reason: None,
        board: Board | None = None,
    ) -> None:
        self._max_requests, self._max_tokens, self._on_refusal = max_requests, max_tokens, on_refusal
        self._full_code = full_code
        self._waiting: dict[str, int] = {}
        self.board = board or Board()
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        """What becomes of new requests."""
        return self.board.state

    @state.setter
    def state(self, state: State) -> None:
        self.board.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that wait, of this front."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Return when requests may begin. Raises `RequestError` (503) in states that do not end by themselves."""
        while (state := self.state) == "paused":
            try:
                await asyncio.wait_for(self._changed.wait(), LOOK_SECONDS if self.board.is_shared else None)
            except TimeoutError:
                pass
        self._check_state(state)

    def admit(self, requests: Sequence[EngineRequest]) -> None:
        """Count these requests as waiting. Raises `RequestError` when the queue has no room for all of them."""
        self._check_state(self.state)
        board = self.board
        count, tokens = len(requests), sum(len(request.prompt_token_ids) for request in requests)
        with board.locked():
            self._check("max_num_queued_reqs", board.total(Count.WAITING), count, self._max_requests)
            self._check("max_num_queued_tokens", board.total(Count.WAITING_TOKENS), tokens, self._max_tokens)
            board.add(Count.WAITING, count)
            board.add(Count.WAITING_TOKENS, tokens)
        self._waiting |= {request.request_id: len(request.prompt_token_ids) for request in requests}

    def release(self, request_id: str) -> None:
        """This request does not wait any more."""
        tokens = self._waiting.pop(request_id, None)
        if tokens is not None:
            self.board.add(Count.WAITING, -1)
            self.board.add(Count.WAITING_TOKENS, -tokens)

    def _check_state(self, state: State) -> None:
        if state in REFUSALS:
            raise RequestError(REFUSALS[state], code=UNAVAILABLE)

    def _check(self, reason: str, queued: int, new: int, limit: int | None) -> None:
        # A request that finds the queue empty is taken however large it is: it would never fit otherwise.
        if limit is None or queued == 0 or queued + new <= limit:
            return
        self._on_refusal(reason)
        raise RequestError(
            f"The server is overloaded: {queued} of {limit} are queued ({reason}). Try again later.",
            code=self._full_code,
        )
