"""The requests that wait for their turn, in order of rank, and the times by which requests must be done."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from paxserve.engine.request import Request

rank_of = attrgetter("rank")


class WaitingQueue:
    """A list of requests kept in order of rank: a preempted request finds its old place again."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put the request where its rank belongs."""
        if not self._requests or self._requests[-1].rank < request.rank:
            self._requests.append(request)
        else:
            insort(self._requests, request, key=rank_of)

    def remove(self, request: Request) -> None:
        """Take the request out. Its rank must be the one it was added with."""
        place = bisect_left(self._requests, request.rank, key=rank_of)
        assert self._requests[place] is request, "a waiting request is not where its rank belongs"
        del self._requests[place]


class Deadlines:
    """When requests must be done, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, time: float, arrival: int, request_id: str) -> None:
        """Note that the request, told from another of its name by its arrival number, ends at `time`."""
        heapq.heappush(self._heap, (time, arrival, request_id))

    def passed(self, now: float) -> Iterator[tuple[int, str]]:
        """Arrival number and id of each request whose time has come; those long finished are among them."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1:]
