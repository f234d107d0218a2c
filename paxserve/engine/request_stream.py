"""Where the outputs of one call wait for whoever reads them: merged while nobody does, so nothing piles up."""

import asyncio
from collections.abc import Callable, Sequence

from paxserve.outputs import CompletionOutput, RequestOutput


class RequestStream:
    """The outputs of one or several requests, as batches of (position of the request, output).

    A reader that is slow gets fewer, larger deltas; it never holds up the engine or other readers.
    """

    def __init__(self, request_ids: Sequence[str], *, is_delta: bool, abort: Callable[[list[str]], None]) -> None:
        self._positions = {request_id: position for position, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._is_delta = is_delta
        self._abort = abort
        self._pending: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def open_ids(self) -> list[str]:
        """The requests that are still running."""
        return list(self._open)

    def put(self, output: RequestOutput) -> None:
        """Take in an output of one of the requests."""
        position = self._positions[output.request_id]
        earlier = self._pending.get(position)
        if earlier is not None and self._is_delta:
            merge_delta(earlier, output)
        else:
            self._pending[position] = output
        if output.finished:
            self._open.discard(output.request_id)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, once what has come before it has been read."""
        self._error = error
        self._open.clear()
        self._wake()

    async def wait_first(self) -> None:
        """Return when there is something to read; raise what the stream failed with if that came first."""
        await self._wait()
        if not self._pending and self._error is not None:
            raise self._error

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[tuple[int, RequestOutput]]:
        """All that has come since the last call."""
        await self._wait()
        if self._pending:
            batch = list(self._pending.items())
            self._pending.clear()
            return batch
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort what is still running; nothing more will be read."""
        if self._open:
            self._abort(self.open_ids)
            self._open.clear()

    async def _wait(self) -> None:
        while not self._pending and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge_delta(earlier: RequestOutput, later: RequestOutput) -> None:
    """Make `earlier` tell what both deltas tell."""
    by_index = {output.index: output for output in earlier.outputs}
    for output in later.outputs:
        known = by_index.get(output.index)
        if known is None:
            earlier.outputs.append(output)
        else:
            merge_choice(known, output)
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    earlier.finished = later.finished
    earlier.num_cached_tokens = later.num_cached_tokens
    earlier.metrics = later.metrics


def merge_choice(earlier: CompletionOutput, later: CompletionOutput) -> None:
    """The same for one choice."""
    earlier.text += later.text
    earlier.token_ids = earlier.token_ids + later.token_ids
    if later.logprobs is not None:
        earlier.logprobs = (earlier.logprobs or []) + later.logprobs
    earlier.cumulative_logprob = later.cumulative_logprob
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
