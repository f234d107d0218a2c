"""Which requests compute how many tokens in the next step, and what becomes of its results.

Prefill, chunked prefill and decode are the same thing with different numbers: every step hands out a
token budget. Nothing here waits for the device: a step is scheduled from counts alone, so step N+1
can be planned before the tokens of step N have been read.

Pages freed here may be handed out again in the very next step although a launched step still uses
them: steps run on the device in the order in which they are launched, so the earlier one is done
with a page before the later one touches it.
"""

import time
from typing import Self

import numpy as np

from paxserve.config import SchedulerConfig
from paxserve.engine.beam_group import BeamGroup
from paxserve.engine.decode_steps import DecodeSet, DecodeStep
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.page_tables import PageTables
from paxserve.engine.page_writers import PageWriters
from paxserve.engine.prefill_limits import PrefillLimits
from paxserve.engine.request import Request, Status
from paxserve.engine.step_plan import RowResult, ScheduledRow, ScheduledStep, StepPlan
from paxserve.engine.waiting_queue import Deadlines, WaitingQueue, rank_of
from paxserve.messages import DecodedTokens, EngineOutput, EngineStats


class Scheduler:
    """A token budget handed out in order of rank, with chunked prefill, shared pages and preemption by recompute.

    Rank is priority, then arrival; without priorities that is first come, first served, but for short prompts, which
    overtake one that is being computed in parts. No page of a running request is taken for a waiting one; when pages
    run out, the running request of the highest rank gives up its own.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefill: PrefillLimits | None = None,
        num_scheduler_steps: int = 1,
    ) -> None:
        self.pool = pool
        self.tables = PageTables(pool)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_sequence_tokens = pool.most_tokens(max_model_len, max_num_batched_tokens)
        self.prefill = prefill or PrefillLimits()
        self.num_scheduler_steps = num_scheduler_steps
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._decodes: DecodeSet | None = None
        """The requests of the last step, while nothing else happens than that all of them decode."""
        self._requests: dict[str, list[Request]] = {}
        self._deadlines = Deadlines()
        self._stats = EngineStats(num_pages=pool.num_pages)

    @classmethod
    def for_config(cls, config: SchedulerConfig, pool: PagePool, max_model_len: int) -> Self:
        """The scheduler that the flags describe."""
        max_num_seqs, max_num_batched_tokens = config.limits
        return cls(
            pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            prefill=PrefillLimits.of(config, max_model_len),
            num_scheduler_steps=config.num_scheduler_steps,
        )

    # Requests in and out

    def add(self, choices: list[Request], deadline: float | None = None) -> None:
        """Queue the choices of one request, which is ended at `deadline` (a time as `expire` is told) if given."""
        first = choices[0]
        self._requests[first.request_id] = choices
        for request in choices:
            request.most_tokens = self.max_sequence_tokens + 1
            if request.max_tokens is not None:
                request.most_tokens = min(request.most_tokens, request.prompt_len + request.max_tokens)
            self.waiting.add(request)
        if deadline is not None:
            self._deadlines.add(deadline, first.arrival, first.request_id)

    def abort(self, request_id: str, index: int | None = None) -> list[int]:
        """Finish the request (or one choice of it) as aborted; returns which choices that ended.

        Unknown or finished ones are none of our business; the choices of a beam search end together.
        """
        choices = list(self._requests.get(request_id, ()))
        group = choices[0].group if choices else None
        ended = [request for request in choices if group is not None or index in (None, request.index)]
        for request in ended:
            self._finish(request, "abort")
        return list(range(group.width)) if group is not None else [request.index for request in ended]

    def expire(self, now: float) -> list[EngineOutput]:
        """End the requests whose deadline has come; returns what their owners should hear."""
        outputs = []
        for arrival, request_id in self._deadlines.passed(now):
            choices = self._requests.get(request_id)
            if not choices or choices[0].arrival != arrival:
                continue
            for index in self.abort(request_id):
                output = EngineOutput(request_id=request_id, index=index, new_token_ids=[])
                output.finish_reason, output.stop_reason = "abort", "timeout"
                outputs.append(output)
        return outputs

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a request another priority, wherever it stands; an unknown one is none of our business."""
        for request in self._requests.get(request_id, ()):
            is_waiting = request.status is Status.WAITING
            if is_waiting:
                self.waiting.remove(request)
            request.rank = (priority, *request.rank[1:])
            if is_waiting:
                self.waiting.add(request)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def reset_prefix_cache(self, *, keeps_disk: bool = False) -> bool:
        """Forget all cached prefixes, but perhaps those on disk; False, and nothing done, while pages are in use."""
        if self.pool.num_in_use:
            return False
        self.tables.reset(keeps_disk=keeps_disk)
        return True

    # One step

    def schedule(self) -> ScheduledStep | DecodeStep | None:
        """Plan the next step, or None when nothing can be computed before more tokens are read."""
        if (step := self._decode_on()) is not None:
            return step
        self._decodes = None
        plan = StepPlan(self.max_num_batched_tokens)
        if self.tables.is_limited:
            for request in self.running:
                self.tables.give_back(request)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            num_pending = request.num_pending
            num_tokens = len(request.token_ids) + num_pending
            if num_tokens >= request.most_tokens or (num_pending and request.needs_host_tokens):
                continue
            remaining = num_tokens - request.num_computed
            if remaining:
                (decodes if remaining == 1 else prefills).append(request)
        # Decodes first, so that a long prompt never holds up a running request; then started prefills.
        prefills.sort(key=rank_of)
        num_running, page_size = len(self.running), self.pool.page_size
        for request in decodes:
            if plan.budget <= 0 or request.status is not Status.RUNNING:
                continue
            if request.num_computed < len(request.tables[0]) * page_size and not request.shares_last_page:
                plan.add(request, 1)
            else:
                self._continue(request, plan)
        if prefills and len(self.running) == num_running:
            num_running += self._admit_short(plan, prefills)
        for request in prefills:
            if plan.budget > 0 and request.status is Status.RUNNING:
                self._continue(request, plan)
        if len(self.running) == num_running:  # else there are not even pages for those that run
            self._admit(plan)
        while not plan.counts and self._give_up_held_beam():
            plan = StepPlan(self.max_num_batched_tokens)
            self._admit(plan)
        return self._commit(plan) if plan.counts else None

    def update(
        self, step: ScheduledStep | DecodeStep, results: list[RowResult] | np.ndarray
    ) -> list[EngineOutput] | DecodedTokens:
        """Take in what a step computed; returns what the requests' owners should hear. Arrays are a `DecodeStep`'s."""
        if isinstance(results, np.ndarray):
            assert isinstance(step, DecodeStep)
            return self._update_decodes(step, results)
        outputs = []
        for row, result in zip(step.rows, results, strict=True):
            request = row.request
            if request.is_finished:
                continue
            if request.wants_prompt_logprobs:
                request.add_prompt_logprobs(row.start, result.prompt_logprobs)
            if row.samples:
                request.num_pending -= 1
                if request.group is None:
                    outputs.append(self._append(request, [result.token_id], result))
                else:
                    outputs += self._advance_search(request, request.group, result)
        return outputs

    def stats(self) -> EngineStats:
        """Counters since start and gauges now."""
        stats, pool = self._stats, self.pool
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.num_pages_in_use = pool.num_in_use
        stats.wasted_tokens = self.tables.num_unused_tokens(self.running)
        return stats

    def check_integrity(self) -> None:
        """Assert that pages, slots and queues agree with each other."""
        running, waiting = self.running, list(self.waiting)
        self.pool.check_integrity(self.tables.held_by(request) for request in running)
        assert all(r.status is Status.RUNNING and r.slot >= 0 for r in running)
        assert all(r.status is Status.WAITING and r.slot < 0 and not r.pages for r in waiting)
        assert [r.rank for r in waiting] == sorted({r.rank for r in waiting})
        assert len({r.slot for r in running} | set(self._free_slots)) == len(running) + len(self._free_slots)
        assert {id(r) for c in self._requests.values() for r in c} == {id(r) for r in (*running, *waiting)}
        for request in running:
            self.tables.check(request)
            assert request.num_computed <= request.num_tokens

    # Steps in which all go on as before

    def _decode_on(self) -> DecodeStep | None:
        """A step in which every running request computes its next tokens; None if there is anything else to do."""
        if self.waiting and self._free_slots:
            return None
        decodes = self._decodes = self._decodes or DecodeSet.of(self.running, self.pool.page_size)
        if decodes is None or len(decodes) > self.max_num_batched_tokens:
            return None
        # Whoever waits is not kept waiting for more than the next token of those that run.
        can_run_ahead = self.num_scheduler_steps > 1 and not self.waiting and decodes.can_run_ahead
        step = decodes.next_step(self.tables, self.num_scheduler_steps if can_run_ahead else 1)
        if step is not None:
            self._stats.num_steps += 1
            self._stats.last_step_tokens = step.num_tokens
            if self.pool.host is not None:
                step.page_saves, step.page_loads = self.pool.host.take_moves()
        return step

    def _update_decodes(self, step: DecodeStep, tokens: np.ndarray) -> list[EngineOutput] | DecodedTokens:
        """Take in the tokens of a `DecodeStep`, [K, R]: all at once unless a request ends here or has ended before."""
        decodes, new_token_ids = step.decodes, tokens.T.tolist()
        if decodes is self._decodes and not step.is_last and decodes.stop_ids.isdisjoint(tokens.ravel().tolist()):
            self._stats.generation_tokens += tokens.size
            return decodes.take_in(step, new_token_ids, self.tables)
        outputs = []
        for request, new, count in zip(decodes.requests, new_token_ids, step.counts.tolist(), strict=True):
            if not request.is_finished:
                request.num_pending -= count
                outputs.append(self._append(request, new[:count]))
        return outputs

    # How a step is put together

    def _continue(self, request: Request, plan: StepPlan) -> None:
        """Plan the next tokens of a running request; the last in rank give up their pages for it, it being one."""
        remaining = request.num_tokens - request.num_computed
        count = self.prefill.chunk(remaining, plan.budget)
        while not self.tables.grow(request, request.num_computed + count, plan):
            victim = max(self.running, key=rank_of)
            plan.drop(victim)
            self._preempt(victim)
            if victim is request:
                return
        plan.add(request, count)
        if count < remaining:
            self.prefill.count(request, plan)

    def _admit_short(self, plan: StepPlan, prefills: list[Request]) -> int:
        """Let short prompts overtake those that are being computed in parts; returns how many were started.

        They get a share of the step's tokens, fit into it whole, have no worse priority, and come only while there
        are pages to spare: they must not cost those that run theirs.
        """
        share = min(plan.budget, self.prefill.share_of(self.max_num_batched_tokens))
        left = plan.budget - sum(request.num_tokens - request.num_computed for request in prefills)
        if left >= share:
            return 0
        missing = sum(self.pool.pages_for(request.num_tokens) - len(request.pages) for request in prefills)
        wanted = missing + len(self.running) + self.pool.pages_for(share)
        if wanted * self.tables.num_groups > self.pool.num_free:
            return 0
        kept = plan.budget - share
        plan.budget = share
        num_started = self._admit(plan, only_short=True, worst_priority=prefills[0].rank[0])
        plan.budget += kept
        return num_started

    def _admit(self, plan: StepPlan, *, only_short: bool = False, worst_priority: int | None = None) -> int:
        """Start waiting requests in order of rank while tokens, slots and pages last; returns how many were."""
        if not self.waiting or plan.budget <= 0 or not self._free_slots:
            return 0
        writers = PageWriters(self.pool, self.running)
        admitted: list[Request] = []
        num_passed_over = 0
        for request in self.waiting:
            if worst_priority is not None and request.rank[0] > worst_priority:
                break
            is_too_long = only_short and request.num_tokens > plan.budget
            if is_too_long or request.num_pending or request.is_held or self._waits_for_leader(request):
                count = None
            else:
                count = self._start(request, plan, writers, is_whole=only_short)
            if count == 0:
                break
            if count is None:
                # Whoever must wait for another does not hold up those behind; but the queue may be long.
                num_passed_over += 1
                if num_passed_over > self.max_num_seqs:
                    break
                continue
            plan.add(request, count)
            admitted.append(request)
            if plan.budget <= 0 or not self._free_slots:
                break
        for request in admitted:
            self.waiting.remove(request)
        return len(admitted)

    def _waits_for_leader(self, request: Request) -> bool:
        leader = request.leader
        if leader is None or leader.is_finished:
            return False
        return leader.status is Status.WAITING or leader.num_computed < leader.prompt_len

    def _start(self, request: Request, plan: StepPlan, writers: PageWriters, *, is_whole: bool) -> int | None:
        """Give a waiting request pages and a slot; returns the tokens it computes.

        0 means that it, and all behind it, must wait for pages or tokens, None that it waits for another request
        (or, with `is_whole`, for a step that it fits into as a whole).
        """
        found = self.tables.find(request)
        num_computed = found.num_tokens
        if writers.has_page_for(request, num_computed):
            return None
        remaining = request.num_tokens - num_computed
        count = self.prefill.chunk(remaining, plan.budget)
        if count < remaining:
            if is_whole:
                return None
            if not self.prefill.enable_chunked_prefill and remaining <= self.max_num_batched_tokens:
                return 0
            if not self.prefill.may_begin(request, plan):
                return None
        if not self.tables.is_at_hand(request, found):
            return None
        if not self.tables.has_room(found, num_computed + count):
            return 0
        self.tables.start(request, found, num_computed + count, plan)
        if count < remaining:
            self.prefill.count(request, plan)
        self._note_start(request, found.num_loaded_pages * self.pool.page_size)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        self.running.append(request)
        writers.note(request)
        return count

    def _note_start(self, request: Request, num_from_host: int) -> None:
        if request.first_scheduled_time:  # it has been preempted, or is a beam that goes on from another
            return
        request.num_cached_tokens = request.num_computed
        request.first_scheduled_time = time.time()
        if request.index == 0:  # the other choices of a request share its prompt: nothing is looked up for them
            self._stats.prefix_cache_queries += request.prompt_len
            on_device = request.num_computed - num_from_host
            self._stats.prefix_cache_hits += on_device
            if self.pool.host is not None:
                self._stats.offloaded_queries += request.prompt_len - on_device
                self._stats.offloaded_hits += num_from_host
            self._stats.prompt_tokens += request.prompt_len

    def _commit(self, plan: StepPlan) -> ScheduledStep:
        """Advance the counts of every planned request, now that the plan stands."""
        rows, page_size = [], self.pool.page_size
        for request, count in plan.counts.items():
            start = request.num_computed
            end = request.num_computed = start + count
            num_tokens = len(request.token_ids) + request.num_pending
            samples = end == num_tokens
            rows.append(ScheduledRow(request, start, count, samples, num_tokens - request.prompt_len))
            if samples:
                request.num_pending += 1
            # Later steps may already share these pages: they run after this one.
            if end // page_size > start // page_size:
                self.tables.cache_full_pages(request, start)
        rows.sort(key=lambda row: row.num_tokens > 1)
        self._stats.num_steps += 1
        self._stats.last_step_tokens = sum(plan.counts.values())
        saves, loads = self.pool.host.take_moves() if self.pool.host is not None else ([], [])
        fills = self.pool.disk.take_fills() if self.pool.disk is not None else []
        return ScheduledStep(rows, list(plan.copies), saves, loads, fills)

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages away; it will be computed again from its tokens."""
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.waiting.add(request)

    # What comes back from a step

    def _append(self, request: Request, tokens: list[int], result: RowResult | None = None) -> EngineOutput:
        """Add sampled tokens to their request, and end the request with its last one; those behind that are dropped.

        `result` is what else came with a single token.
        """
        first, stop_reason = len(request.token_ids), None
        for token in tokens:
            request.token_ids.append(token)
            known = len(request.token_ids)
            if token in request.stop_token_ids and known - request.prompt_len > request.params.min_tokens:
                self._finish(request, "stop")
                stop_reason = token if token in request.params.stop_token_ids else None
            elif known - request.prompt_len == request.max_tokens or known > self.max_sequence_tokens:
                self._finish(request, "length")
            elif known % self.pool.page_size == 0 and request.status is Status.RUNNING:
                self.tables.cache_full_pages(request, known - 1)
            if request.is_finished:
                break
        new_token_ids = request.token_ids[first:]
        self._stats.generation_tokens += len(new_token_ids)
        is_first = first == request.prompt_len
        return EngineOutput(
            request_id=request.request_id,
            index=request.index,
            new_token_ids=new_token_ids,
            logprobs=None if result is None or result.logprobs is None else [result.logprobs],
            prompt_logprobs=request.prompt_logprobs if is_first and request.wants_prompt_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            num_preemptions=request.num_preemptions,
        )

    # Beams

    def _advance_search(self, beam: Request, group: BeamGroup, result: RowResult) -> list[EngineOutput]:
        """Take in the candidates of one beam; when they are the last, go on with the best, or end the search."""
        assert result.logprobs is not None, "a beam's row was computed without log-probabilities"
        if not group.report(beam, result.logprobs):
            return []
        ended, forks = group.advance()
        for request in ended:
            self._finish(request, "stop")
        for parent, child in forks:
            self._fork(parent, child)
        outputs = [] if group.beams else group.outputs()
        self._stats.generation_tokens += sum(len(output.new_token_ids) for output in outputs)
        return outputs

    def _fork(self, parent: Request, child: Request) -> None:
        """Have a new beam run from where its parent is, or wait if the parent waits or there is no slot."""
        self._requests[parent.request_id].append(child)
        if parent.status is not Status.RUNNING or not self._free_slots:
            self.waiting.add(child)
            return
        self.tables.fork(parent, child)
        child.slot = self._free_slots.pop()
        child.status = Status.RUNNING
        self.running.append(child)

    def _give_up_held_beam(self) -> bool:
        """Take the pages of a beam that waits for others, if it is those that cannot run for want of them."""
        held = [request for request in self.running if request.is_held]
        if not held or not self.waiting or any(request.num_pending for request in self.running):
            return False
        self._preempt(max(held, key=rank_of))
        return True

    # The end

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is Status.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
            self.tables.forget(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        choices = self._requests[request.request_id]
        choices.remove(request)
        if not choices:
            del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._decodes = None
        self.tables.release(request)
        self._free_slots.append(request.slot)
        request.slot = -1
