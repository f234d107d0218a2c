"""The pooling requests in flight on a server, and who waits for each."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paxserve.engine.pooling_results import read_pooled
from paxserve.messages import EngineOutput, EngineRequest
from paxserve.pooling_outputs import PoolingOutput, PoolingRequestOutput

Pooled = PoolingRequestOutput[PoolingOutput]


class _Waiting(NamedTuple):
    request: EngineRequest
    result: asyncio.Future[Pooled]


class PooledRequests:
    """Requests by id, until they are answered, fail, or nobody waits for them any more."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        """Requests that somebody waits for."""
        return len(self._waiting)

    def expect(self, request: EngineRequest) -> asyncio.Future[Pooled]:
        """The future answer to a request that is about to be sent."""
        future: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = _Waiting(request, future)
        return future

    def take(self, outputs: Iterable[EngineOutput]) -> list[Pooled]:
        """Hand answers to whoever waits for them; returns them."""
        answers = []
        for output in outputs:
            if output.pooled is not None and (waiting := self._waiting.pop(output.request_id, None)) is not None:
                answer = read_pooled(waiting.request, output)
                answers.append(answer)
                if not waiting.result.done():
                    waiting.result.set_result(answer)
        return answers

    def fail(self, error: Exception, request_ids: Iterable[str] | None = None) -> None:
        """End these requests (or all) with an error."""
        for request_id in list(self._waiting if request_ids is None else request_ids):
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None and not waiting.result.done():
                waiting.result.set_exception(error)

    def forget(self, requests: Sequence[EngineRequest]) -> list[str]:
        """Stop waiting for these requests; the ids of those that were not answered yet."""
        left = [request.request_id for request in requests if request.request_id in self._waiting]
        for request_id in left:
            self._waiting.pop(request_id).result.cancel()
        return left
