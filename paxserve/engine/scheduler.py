"""Which requests compute how many tokens in the next step, and what becomes of its results.

Prefill, chunked prefill and decode are the same thing with different numbers: every step hands out a
token budget. Nothing here waits for the device: a step is scheduled from counts alone, so step N+1
can be planned before the tokens of step N have been read.

Pages freed here may be handed out again in the very next step although a launched step still uses
them: steps run on the device in the order in which they are launched, so the earlier one is done
with a page before the later one touches it.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import Request, Status
from paxserve.errors import OutOfPages
from paxserve.messages import EngineOutput, EngineStats, TokenLogprobs


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
    """(from, to): pages to copy before the step runs."""

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class RowResult:
    """What the device found for one row of a step."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a query token of the row: about the prompt token that follows it."""


class Scheduler:
    """FCFS with a token budget, chunked prefill, prefix caching and preemption by recompute."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_sequence_tokens = min(max_model_len, pool.num_pages * pool.page_size)
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._requests: dict[str, list[Request]] = {}
        self._stats = EngineStats(num_pages=pool.num_pages)

    # Requests in and out

    def add(self, choices: list[Request]) -> None:
        """Queue the choices of one request."""
        self._requests[choices[0].request_id] = choices
        self.waiting.extend(choices)

    def abort(self, request_id: str, index: int | None = None) -> list[Request]:
        """Finish the request (or one choice of it) as aborted; unknown or finished ones are none of our business."""
        aborted = []
        for request in list(self._requests.get(request_id, ())):
            if index in (None, request.index):
                self._finish(request, "abort")
                aborted.append(request)
        return aborted

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while pages are in use."""
        if self.pool.num_in_use:
            return False
        self.pool.reset_prefix_cache()
        return True

    # One step

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None when nothing can be computed before more tokens are read."""
        plan: dict[Request, int] = {}
        copies: list[tuple[int, int]] = []
        budget = self.max_num_batched_tokens
        preempted = False
        # Decodes first, so that a long prompt never holds up a running request; then started prefills.
        for decoding in (True, False):
            for request in list(self.running):
                if request.status is not Status.RUNNING or (self._remaining(request) == 1) != decoding:
                    continue
                count = min(self._remaining(request), budget)
                if count <= 0 or request in plan or not self._can_run(request):
                    continue
                while not self._grow(request, request.num_computed + count):
                    victim = self.running[-1]
                    budget += plan.pop(victim, 0)
                    self._preempt(victim)
                    preempted = True
                    if victim is request:
                        break
                else:
                    plan[request] = count
                    budget -= count
        if not preempted:
            self._admit(plan, copies, budget)
        return self._commit(plan, copies) if plan else None

    def update(self, step: ScheduledStep, results: list[RowResult]) -> list[EngineOutput]:
        """Take in what a step computed; returns what the requests' owners should hear."""
        outputs = []
        for row, result in zip(step.rows, results, strict=True):
            request = row.request
            if request.is_finished:
                continue
            if request.wants_prompt_logprobs:
                self._collect_prompt_logprobs(request, row, result)
            if row.samples:
                request.num_pending -= 1
                outputs.append(self._append(request, result))
        return outputs

    def stats(self) -> EngineStats:
        """Counters since start and gauges now."""
        stats, pool = self._stats, self.pool
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.num_pages_in_use = pool.num_in_use
        stats.wasted_tokens = sum(len(r.pages) * pool.page_size - r.num_computed for r in self.running)
        return stats

    def check_integrity(self) -> None:
        """Assert that pages, slots and queues agree with each other."""
        running, waiting = self.running, list(self.waiting)
        self.pool.check_integrity(request.pages for request in running)
        assert all(r.status is Status.RUNNING and r.slot >= 0 for r in running)
        assert all(r.status is Status.WAITING and r.slot < 0 and not r.pages for r in waiting)
        assert len({r.slot for r in running} | set(self._free_slots)) == len(running) + len(self._free_slots)
        assert {id(r) for c in self._requests.values() for r in c} == {id(r) for r in (*running, *waiting)}
        for request in running:
            assert self.pool.pages_for(request.num_computed) <= len(request.pages)
            assert request.num_computed <= request.num_tokens

    # How a step is put together

    def _remaining(self, request: Request) -> int:
        return request.num_tokens - request.num_computed

    def _can_run(self, request: Request) -> bool:
        if request.has_all_tokens_planned or request.num_tokens >= self.max_sequence_tokens + 1:
            return False
        return not (request.num_pending and request.needs_host_tokens)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request the pages for `num_tokens` tokens, if there are enough."""
        missing = self.pool.pages_for(num_tokens) - len(request.pages)
        if missing > 0:
            try:
                request.pages += self.pool.allocate(missing)
            except OutOfPages:
                return False
        return True

    def _admit(self, plan: dict[Request, int], copies: list[tuple[int, int]], budget: int) -> None:
        """Start waiting requests, first come first served, while tokens, slots and pages last."""
        held_back: list[Request] = []
        while self.waiting and budget > 0 and self._free_slots:
            request = self.waiting.popleft()
            if request.num_pending or self._waits_for_leader(request):
                held_back.append(request)
                continue
            count = self._start(request, copies, budget)
            if count == 0:
                self.waiting.appendleft(request)
                break
            plan[request] = count
            budget -= count
        self.waiting.extendleft(reversed(held_back))

    def _waits_for_leader(self, request: Request) -> bool:
        leader = request.leader
        if leader is None or leader.is_finished:
            return False
        return leader.status is Status.WAITING or leader.num_computed < leader.prompt_len

    def _start(self, request: Request, copies: list[tuple[int, int]], budget: int) -> int:
        """Give a waiting request pages and a slot; returns the tokens it computes, or 0 if it must wait."""
        shared, partial = self._shared_pages(request)
        num_computed = len(shared) * self.pool.page_size
        if partial is not None:
            num_computed = request.prompt_len - 1
        count = request.num_tokens - num_computed
        if count > budget:
            if not self.enable_chunked_prefill and count <= self.max_num_batched_tokens:
                return 0
            count = budget
        fresh = self.pool.pages_for(num_computed + count) - len(shared)
        if fresh > self.pool.num_free - self.pool.num_free_among(shared):
            return 0
        self.pool.hold(shared)
        request.pages = shared + self.pool.allocate(fresh)
        if partial is not None:
            copies.append((partial, request.pages[len(shared)]))
        self._count_cached(request, num_computed)
        request.num_computed = num_computed
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        self.running.append(request)
        return count

    def _shared_pages(self, request: Request) -> tuple[list[int], int | None]:
        """Full pages that already hold the start of the request, and a partly filled one to copy."""
        page_size, leader = self.pool.page_size, request.leader
        if leader is not None and leader.status is Status.RUNNING and leader.num_computed >= leader.prompt_len:
            # The last prompt token is computed again, for its logits; all before it is the leader's.
            full, rest = divmod(request.prompt_len - 1, page_size)
            return leader.pages[:full], leader.pages[full] if rest else None
        cache = self.pool.prefix_cache
        if cache is None or request.wants_prompt_logprobs:
            return [], None
        full = (request.num_tokens - 1) // page_size
        return cache.find(request.page_hashes(full, page_size)), None

    def _count_cached(self, request: Request, num_computed: int) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed
            request.first_scheduled_time = time.time()
            self._stats.prefix_cache_queries += request.prompt_len
            self._stats.prefix_cache_hits += num_computed
            self._stats.prompt_tokens += request.prompt_len

    def _commit(self, plan: dict[Request, int], copies: list[tuple[int, int]]) -> ScheduledStep:
        """Advance the counts of every planned request, now that the plan stands."""
        rows = []
        for request, count in plan.items():
            row = ScheduledRow(request, request.num_computed, count, False, request.output_len)
            request.num_computed += count
            if request.num_computed == request.num_tokens:
                row.samples = True
                request.num_pending += 1
            # Later steps may already share these pages: they run after this one.
            self._cache_full_pages(request, row.start)
            rows.append(row)
        rows.sort(key=lambda row: row.num_tokens > 1)
        self._stats.num_steps += 1
        self._stats.last_step_tokens = sum(plan.values())
        return ScheduledStep(rows, copies)

    def _cache_full_pages(self, request: Request, start: int) -> None:
        """Enter pages into the prefix cache that are full of known tokens, from the page of token `start` on."""
        cache, page_size = self.pool.prefix_cache, self.pool.page_size
        if cache is None:
            return
        full = min(request.num_computed, len(request.token_ids)) // page_size
        first = start // page_size
        if full > first:
            for page, digest in enumerate(request.page_hashes(full, page_size)[first:], start=first):
                cache.insert(digest, request.pages[page])

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages away; it will be computed again from its tokens."""
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.waiting.appendleft(request)

    # What comes back from a step

    def _append(self, request: Request, result: RowResult) -> EngineOutput:
        """Add the sampled token to its request, and end the request if that was its last."""
        token = result.token_id
        request.token_ids.append(token)
        self._stats.generation_tokens += 1
        stop_reason = None
        known = len(request.token_ids)
        if token in request.stop_token_ids and known - request.prompt_len > request.params.min_tokens:
            self._finish(request, "stop")
            stop_reason = token if token in request.params.stop_token_ids else None
        elif known - request.prompt_len == request.max_tokens or known > self.max_sequence_tokens:
            self._finish(request, "length")
        elif known % self.pool.page_size == 0 and request.status is Status.RUNNING:
            self._cache_full_pages(request, known - 1)
        first = known - request.prompt_len == 1
        return EngineOutput(
            request_id=request.request_id,
            index=request.index,
            new_token_ids=[token],
            logprobs=None if result.logprobs is None else [result.logprobs],
            prompt_logprobs=request.prompt_logprobs if first and request.wants_prompt_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            num_preemptions=request.num_preemptions,
        )

    def _collect_prompt_logprobs(self, request: Request, row: ScheduledRow, result: RowResult) -> None:
        for position, entry in enumerate(result.prompt_logprobs, start=row.start + 1):
            # A preempted prompt is computed twice; its tokens' numbers are taken once.
            if position == len(request.prompt_logprobs) < request.prompt_len:
                request.prompt_logprobs.append(entry)

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is Status.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        choices = self._requests[request.request_id]
        choices.remove(request)
        if not choices:
            del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.slot = [], -1
