"""What paged memory is compared with: one contiguous stretch a request, reserved when it starts and kept to its end.

As in the PagedAttention paper (arXiv:2309.06180, section 6.1), but kinder: no memory is lost between stretches.
"""

from collections import deque
from typing import Literal

from paxserve.engine.request import Request, Status
from paxserve.engine.step_plan import RowResult, ScheduledRow, ScheduledStep
from paxserve.messages import EngineOutput, EngineStats

Reservation = Literal["longest", "exact"]
"""Room for the longest sequence that there can be (Orca-Max), or for the length it will have (Orca-Oracle)."""


class ContiguousScheduler:
    """First come, first served, with the interface of `Scheduler` as far as a simulation needs it.

    A static one starts requests only when all of the batch before have ended, and computes the rows of those that
    have ended until then.
    """

    def __init__(
        self,
        kv_tokens: int,
        *,
        reservation: Reservation,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        is_static: bool = False,
    ) -> None:
        self.kv_tokens = kv_tokens
        self.reservation: Reservation = reservation
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.is_static = is_static
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_idle_rows = 0
        """Rows of the batch that the planned step computes although their requests have all their tokens."""
        self._batch_size = 0
        self._num_reserved = 0
        self._stats = EngineStats(num_pages=kv_tokens)

    def add(self, choices: list[Request]) -> None:
        """Queue the choices of a request."""
        self.waiting.extend(choices)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None when nothing can be computed before more tokens are read."""
        self._admit()
        budget = self.max_num_batched_tokens
        rows = []
        for request in sorted(self.running, key=lambda r: r.num_tokens - r.num_computed > 1):
            count = min(request.num_tokens - request.num_computed, budget)
            if count > 0 and not request.has_all_tokens_planned:
                budget -= count
                row = ScheduledRow(request, request.num_computed, count, False, request.output_len)
                request.num_computed += count
                if request.num_computed == request.num_tokens:
                    row.samples = True
                    request.num_pending += 1
                rows.append(row)
        if self.is_static:
            self.num_idle_rows = self._batch_size - sum(not r.has_all_tokens_planned for r in self.running)
            self.num_idle_rows -= sum(row.request.has_all_tokens_planned for row in rows)
        return ScheduledStep(rows, []) if rows else None

    def update(self, step: ScheduledStep, results: list[RowResult]) -> list[EngineOutput]:
        """Take in what a step computed."""
        outputs = []
        for row, result in zip(step.rows, results, strict=True):
            if not row.samples:
                continue
            request = row.request
            request.num_pending -= 1
            request.token_ids.append(result.token_id)
            output = EngineOutput(request_id=request.request_id, new_token_ids=[result.token_id])
            if len(request.token_ids) - request.prompt_len == request.max_tokens:
                output.finish_reason = "length"
                self._finish(request)
            outputs.append(output)
        return outputs

    def stats(self) -> EngineStats:
        """Gauges now; a page is one token here."""
        stats = self._stats
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.num_pages_in_use = self._num_reserved
        stats.wasted_tokens = self._num_reserved - sum([request.num_computed for request in self.running])
        return stats

    def _admit(self) -> None:
        if self.is_static and self.running:
            return
        while self.waiting and len(self.running) < self.max_num_seqs:
            need = self._need(self.waiting[0])
            if self._num_reserved + need > self.kv_tokens:
                return
            request = self.waiting.popleft()
            request.status = Status.RUNNING
            self._num_reserved += need
            self.running.append(request)
            self._batch_size = len(self.running)

    def _need(self, request: Request) -> int:
        exact = request.prompt_len + (request.max_tokens or 0)
        return exact if self.reservation == "exact" else self.max_model_len

    def _finish(self, request: Request) -> None:
        request.status = Status.FINISHED
        self.running.remove(request)
        self._num_reserved -= self._need(request)
