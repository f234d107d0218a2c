"""Random lives of requests against the scheduler and its pages, on a device that remembers what each page holds."""

import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from models.layer_groups import Reach
from paxserve.beam_search_params import BeamSearchParams
from paxserve.engine.beam_group import first_beam
from paxserve.engine.beam_search import BeamSearch
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.host_tier import HostTier
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.page_tables import NO_PAGE
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult, ScheduledRow, ScheduledStep
from paxserve.messages import EngineRequest, TokenLogprobs
from paxserve.sampling_params import SamplingParams

EOS, STOP = 0, 1
EMPTY = None
ROOTS = {}
"""An object for each group of layers and combination of salt and keys, where its prefixes begin."""
MET = Counter()
"""How often something has happened, over all sequences of this process."""
WHAT_IS_RARE = ("saved", "restored", "copied", "prefix hits", "forked beams", "preempted", "decodes", "decodes ahead")
GROUPS = [
    (Reach(),),
    (Reach(),),
    (Reach(window=3),),
    (Reach(), Reach(window=4), Reach(window=4)),
    (Reach(window=2), Reach(window=7)),
    (Reach(), Reach(), Reach(window=1), Reach(chunk=12)),
]


def cut(entry, count):
    """The sampled token and the `count` most likely ones."""
    return TokenLogprobs(entry.token_ids[: count + 1], entry.logprobs[: count + 1], entry.rank)


def root_of(source, group):
    """What a group's prefixes of a request start from; interned, as prefixes are compared by identity."""
    return ROOTS.setdefault((group, source.cache_salt, *source.cache_keys), object())


def keys_of(request, group, pool):
    """What the request's full pages of a group are found by."""
    suffix = bytes([group]) if len(pool.reaches) > 1 else b""
    return [digest + suffix for digest in request.page_hashes(len(request.token_ids) // pool.page_size, pool.page_size)]


class Device:
    """Runs steps in the order of their launch. A cell holds the whole prefix that its keys and values stand for.

    A prefix is a linked pair (prefix before, token), starting at the page's group and the request's salt and keys, so
    that equal cells mean equal tokens all the way down, and equal groups, salts and keys.
    """

    def __init__(self, num_pages, page_size, salt):
        self.page_size = page_size
        self.cells = [[EMPTY] * page_size for _ in range(num_pages)]
        self.slots = {}
        """What each place in host memory holds."""
        self.salt = salt
        self.outputs = {}
        """Every token ever sampled, by (request id, choice)."""
        self._last_tokens = {}
        """What each slot sampled last: (request id, choice) and index in the sequence."""
        self._interned = {}

    def prefix(self, before, token):
        """One object a prefix, so that comparing is cheap."""
        return self._interned.setdefault((id(before), token), (before, token))

    def candidates(self, tokens):
        """Every token with a made-up log-probability that depends on the sequence alone, the most likely first."""
        chance = random.Random(f"{self.salt} {tokens}")
        found = sorted(((-10 * chance.random(), token) for token in range(12)), reverse=True)
        return TokenLogprobs([10**6, *(token for _, token in found)], [0.0, *(logprob for logprob, _ in found)], 1)

    def tokens_of(self, request, source):
        """The true tokens, those included that the host has not read."""
        if request.group is not None:
            return request.token_ids
        return source.prompt_token_ids + self.outputs.setdefault((request.request_id, request.index), [])

    def sample(self, request, position):
        """A token that depends on seed and position alone; few different ones, so that outputs make prefixes too."""
        return random.Random(f"{self.salt} {request.seed} {position}").choice([EOS, STOP, 5, 5, 5, 6, 6, 7])

    def run(self, step, sources, pool):
        """Save, load and copy pages, check what rows will read, write what they compute, sample."""
        self.save(step.page_saves)
        targets = [page for _, page in step.page_loads]
        assert len(set(targets)) == len(targets), "one page is to hold two loads"
        for slot, page in step.page_loads:
            self.cells[page] = list(self.slots[slot])
        targets = [target for _, target in step.page_copies]
        assert len(set(targets)) == len(targets), "one page is to hold two copies"
        for source, target in step.page_copies:
            assert pool.ref_count(target) == 1
            self.cells[target] = list(self.cells[source])
        written, plans = {}, []
        for row in step.rows:
            plans.append((row, self._plan(row, sources[row.request.request_id], pool, written)))
        read = {row.request: {page for table in row.request.tables for page in table} for row in step.rows}
        for page, writer in written.items():
            others = [r for r, pages in read.items() if r is not writer and page in pages]
            assert not others, f"page {page} is written while another row reads it"
        return [self._compute(row, plan, sources[row.request.request_id]) for row, plan in plans]

    def run_decodes(self, step, sources, pool):
        """What a program of decode steps hands over, [K, R]: -1 once a row has ended."""
        tokens = np.full((step.count, step.num_rows), -1)
        for iteration in range(step.count):
            places = [place for place, count in enumerate(step.counts) if iteration < count]
            rows = [self._row(step, place, iteration) for place in places]
            ended = [step.count > 1 and self._has_ended(row.request) for row in rows]
            moves = (step.page_saves, step.page_loads) if iteration == 0 else ([], [])
            results = self.run(ScheduledStep(rows, [], *moves), sources, pool)
            for place, result, has_ended in zip(places, results, ended, strict=True):
                tokens[iteration, place] = -1 if has_ended else result.token_id
        return tokens

    def _row(self, step, place, iteration):
        decodes, age = step.decodes, step.age + iteration
        start, position = decodes.starts[place] + age, decodes.positions[place] + age
        return ScheduledRow(decodes.requests[place], int(start), 1, True, int(position))

    def _has_ended(self, request):
        """Whether its last token, which the host has not read, is one that ends it."""
        outputs, params = self.outputs[request.request_id, request.index], request.params
        is_unread = len(outputs) + request.prompt_len > len(request.token_ids)
        return is_unread and outputs[-1] in request.stop_token_ids and len(outputs) > params.min_tokens

    def save(self, saves):
        for page, slot, _ in saves:
            self.slots[slot] = list(self.cells[page])

    def _plan(self, row, source, pool, written):
        request, size = row.request, self.page_size
        tokens = self.tokens_of(request, source)
        assert request.token_ids == tokens[: len(request.token_ids)]
        end = row.start + row.num_tokens
        assert end <= len(tokens)
        assert row.samples == (end == len(tokens))
        plan = []
        for group, (table, reach) in enumerate(zip(request.tables, pool.reaches, strict=True)):
            prefix = root_of(source, group)
            for i, token in enumerate(tokens[:end]):
                prefix = self.prefix(prefix, token)
                page = table[i // size]
                if i >= row.start:
                    assert pool.ref_count(page) == 1, f"page {page} is written but shared"
                    assert written.setdefault(page, request) is request, f"page {page} has two writers"
                    plan.append((page, i % size, prefix))
                elif i >= reach.first_seen(row.start):
                    assert page != NO_PAGE
                    assert self.cells[page][i % size] is prefix, f"position {i} of {request.request_id} is not there"
        for i in range(max(row.start, len(request.token_ids)), end):  # the host cannot say which token this is
            assert self._last_tokens[request.slot] == (request.request_id, request.index, i)
        return plan

    def _compute(self, row, plan, source):
        for page, offset, prefix in plan:
            self.cells[page][offset] = prefix
        request, token = row.request, 10**6
        if request.group is not None:
            assert row.position == len(request.output_token_ids)
            found = self.candidates(request.token_ids)
            return RowResult(token, logprobs=cut(found, request.params.logprobs))
        if row.samples:
            outputs = self.outputs[request.request_id, request.index]
            assert row.position == len(outputs)
            token = self.sample(request, row.position)
            outputs.append(token)
            self._last_tokens[request.slot] = request.request_id, request.index, row.start + row.num_tokens
        targets = [*source.prompt_token_ids[1:], -1][row.start : row.start + row.num_tokens]
        return RowResult(token, prompt_logprobs=[TokenLogprobs([target], [0.0], 1) for target in targets])


class EngineMachine(RuleBasedStateMachine):
    """The engine's loop with the device above; what it must answer is worked out from the sampled tokens."""

    @initialize(
        num_pages=st.integers(2, 24),
        page_size=st.sampled_from([1, 2, 3, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        chunked=st.booleans(),
        caching=st.booleans() | st.just(True),
        max_model_len=st.integers(6, 60),
        depth=st.sampled_from([1, 2, 2, 3]),
        salt=st.integers(0, 10**6),
        partial=st.sampled_from([(1, 1, 0), (1, 1, 0), (1, 1, 3), (2, 1, 3), (3, 3, 2)]),
        num_slots=st.sampled_from([0, 1, 3, 8, 30]),
        reaches=st.sampled_from(GROUPS),
        ahead=st.sampled_from([1, 1, 2, 5]),
    )
    def start(
        self, num_pages, page_size, max_num_seqs, budget, chunked, caching, max_model_len, depth, salt, partial,
        num_slots=0, reaches=GROUPS[0], ahead=1,
    ):  # fmt: skip
        num_pages *= len(reaches)
        host = HostTier(num_slots) if caching and num_slots else None
        self.pool = PagePool(num_pages, page_size, enable_prefix_caching=caching, host=host, reaches=reaches)
        num_partial, num_long, self.threshold = partial if chunked else (1, 1, 0)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(budget, max_num_seqs),
            max_model_len=max_model_len, enable_chunked_prefill=chunked, max_num_partial_prefills=num_partial,
            max_long_partial_prefills=num_long, long_prefill_token_threshold=self.threshold,
            num_scheduler_steps=ahead,
        )  # fmt: skip
        self.max_num_seqs = max_num_seqs
        self.depth = depth
        self.device = Device(num_pages, page_size, salt)
        self.sources = {}
        self.deadlines = {}
        self.open = {}
        """Tokens heard so far of each choice that has not ended."""
        self.launched = deque()
        self.num_idle = 0
        self.now = 0

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(5, 7), max_size=8),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 12) | st.none(),
        min_tokens=st.sampled_from([0, 0, 3]),
        is_endless=st.booleans(),
        cache_salt=st.sampled_from([None, None, None, "a"]),
        cache_keys=st.sampled_from([[], [], [], ["adapter"]]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        needs_host=st.sampled_from([False, False, False, True]),
        repeat=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        timeout=st.sampled_from([None, None, None, 5, 20]),
    )
    def add(
        self, shared, own, n, max_tokens, min_tokens, is_endless, cache_salt, cache_keys, prompt_logprobs, needs_host,
        repeat, priority, timeout,
    ):  # fmt: skip
        prompt = [5, 6, 7, 7, 6, 5, 5, 6, 6, 7, 5, 7][:shared] + own
        if repeat and self.sources:  # a prompt that goes on where an earlier answer ended, as in a chat
            prompt = self._conversation() + own
        prompt = (prompt or [5])[: self.scheduler.max_sequence_tokens]
        params = SamplingParams(
            n=n, temperature=1.0, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens or 3),
            ignore_eos=is_endless, eos_token_ids=[EOS], stop_token_ids=[] if is_endless else [STOP],
            prompt_logprobs=prompt_logprobs,
        )  # fmt: skip
        if needs_host:
            params.bad_words_token_ids = [[5, 6]]
        request_id = f"r{len(self.sources)}"
        source = EngineRequest(
            request_id=request_id, prompt_token_ids=prompt, params=params, arrival_time=0.0, cache_salt=cache_salt,
            cache_keys=cache_keys, priority=priority,
        )  # fmt: skip
        self.sources[request_id] = source
        seeds = [len(self.sources) * 100 + index for index in range(n)]
        deadline = None if timeout is None else self.now + timeout
        self.scheduler.add(expand_choices(source, seeds, len(self.sources)), deadline)
        if deadline is not None:
            self.deadlines[request_id] = deadline
        self.open.update({(request_id, index): [] for index in range(n)})

    @rule(
        shared=st.integers(1, 12),
        own=st.lists(st.integers(5, 7), max_size=4),
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 8),
        early_stopping=st.sampled_from([True, False, "never"]),
        priority=st.sampled_from([0, 0, -1]),
    )
    def add_search(self, shared, own, width, max_tokens, early_stopping, priority):
        width = min(width, self.max_num_seqs)
        prompt = [5, 6, 7, 7, 6, 5, 5, 6, 6, 7, 5, 7][:shared] + own
        prompt = prompt[: max(1, self.scheduler.max_sequence_tokens - max_tokens)]
        max_tokens = min(max_tokens, self.scheduler.max_sequence_tokens - len(prompt) + 1)
        params = SamplingParams(
            n=width, temperature=1.0, max_tokens=max_tokens, eos_token_ids=[EOS], stop_token_ids=[STOP]
        )
        beams = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=early_stopping)
        request_id = f"r{len(self.sources)}"
        source = EngineRequest(
            request_id=request_id, prompt_token_ids=prompt, params=params, arrival_time=0.0, priority=priority,
            beam_search=beams,
        )  # fmt: skip
        self.sources[request_id] = source
        self.scheduler.add([first_beam(source, len(self.sources), self.scheduler.max_sequence_tokens)])
        self.open.update({(request_id, index): [] for index in range(width)})

    def _found(self, source):
        """What the search comes to, found without pages or steps."""
        search = BeamSearch(source.beam_search, source.params.all_stop_token_ids, source.params.max_tokens)
        beams = [[]]
        while beams:
            candidates = [self.device.candidates(source.prompt_token_ids + tokens) for tokens in beams]
            chosen = search.advance(beams, [cut(entry, search.num_candidates) for entry in candidates])
            beams = [[*beams[c.beam], c.token] for c in chosen]
        return search.hypotheses

    def _conversation(self):
        (request_id, _), outputs = next(iter(self.device.outputs.items()), (("r0", 0), []))
        return self.sources[request_id].prompt_token_ids + outputs[:6]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole):
        request_id, index = data.draw(st.sampled_from(sorted(self.open)))
        aborted = self.scheduler.abort(request_id, None if whole else index)
        whole = whole or self.sources[request_id].beam_search is not None
        expected = {key for key in self.open if key[0] == request_id and (whole or key[1] == index)}
        assert {(request_id, ended) for ended in aborted} == expected
        for key in expected:
            del self.open[key]

    @rule()
    def abort_unknown(self):
        assert self.scheduler.abort("nobody") == []

    @rule()
    def reset(self):
        in_use = self.pool.num_in_use
        assert self.scheduler.reset_prefix_cache() == (in_use == 0)
        if in_use == 0 and self.pool.prefix_cache is not None:
            assert len(self.pool.prefix_cache) == 0

    @precondition(lambda self: self.open)
    @rule(data=st.data(), priority=st.integers(-2, 2))
    def change_priority(self, data, priority):
        request_id, _ = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.set_priority(request_id, priority)

    @rule(seconds=st.integers(1, 4))
    def expire(self, seconds):
        self.now += seconds
        late = {key for key in self.open if self.deadlines.get(key[0], self.now + 1) <= self.now}
        outputs = self.scheduler.expire(self.now)
        assert {(output.request_id, output.index) for output in outputs} == late
        assert all((output.finish_reason, output.stop_reason) == ("abort", "timeout") for output in outputs)
        for key in late:
            del self.open[key]

    @precondition(lambda self: self.scheduler.running)
    @rule(place=st.integers(0, 5))
    def preempt(self, place):
        """Somebody loses its pages in mid-life, perhaps with tokens on their way."""
        running = self.scheduler.running
        self.scheduler._preempt(running[place % len(running)])

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def evict(self, data):
        """Somebody else takes free pages for a moment: what they held is gone."""
        pages = self.pool.allocate(data.draw(st.integers(1, self.pool.num_free)))
        if self.pool.host is not None:
            saves, loads = self.pool.host.take_moves()
            assert not loads
            self.device.save(saves)
        for page in pages:
            self.device.cells[page] = [EMPTY] * self.pool.page_size
        self.pool.release(pages)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.step()

    def step(self):
        scheduled = self.scheduler.schedule()
        self.check()
        if scheduled is not None:
            if isinstance(scheduled, DecodeStep):
                self._check_decodes(scheduled)
                run = self.device.run_decodes
            else:
                self._check_step(scheduled)
                self._count(scheduled)
                run = self.device.run
            self.launched.append((scheduled, run(scheduled, self.sources, self.pool)))
        if self.launched and (scheduled is None or len(self.launched) >= self.depth):
            self._hear(*self.launched.popleft())
            self.check()
        elif scheduled is None:
            self.num_idle += 1
            # A step may do nothing but preempt; two in a row with requests left would be a deadlock.
            assert self.num_idle < 2 or not self.scheduler.has_unfinished()
            return
        self.num_idle = 0

    def _check_decodes(self, step):
        assert step.num_rows == len(self.scheduler.running) <= self.scheduler.max_num_batched_tokens
        assert 1 <= step.count <= self.scheduler.num_scheduler_steps
        assert step.counts.min() >= 1
        assert step.counts.max() == step.count
        assert step.count == 1 or not self.scheduler.waiting, "somebody waits for several steps"
        MET["saved"] += len(step.page_saves)
        MET["decodes"] += step.num_rows
        MET["decodes ahead"] += step.num_tokens - step.num_rows

    def _count(self, step):
        MET["saved"] += len(step.page_saves)
        MET["restored"] += len(step.page_loads)
        MET["copied"] += len(step.page_copies)
        MET["prefix hits"] += sum(row.start == row.request.num_cached_tokens > 0 for row in step.rows)
        MET["forked beams"] += sum(row.request.group is not None and row.request.index > 0 for row in step.rows)

    def _check_step(self, step):
        assert 0 < step.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({row.request for row in step.rows}) == len(step.rows) <= self.max_num_seqs
        assert len({row.request.slot for row in step.rows}) == len(step.rows)
        assert all(row.num_tokens > 0 for row in step.rows)
        is_long = [row.num_tokens > 1 for row in step.rows]
        assert is_long == sorted(is_long), "decode rows come first"
        if self.threshold:
            assert all(row.num_tokens <= self.threshold for row in step.rows)
        for row in step.rows:
            assert row.request.num_cached_tokens < row.request.prompt_len
            if row.request.needs_host_tokens and row.samples:
                assert row.request.num_pending == 1, "the tokens before must have been read"

    def _hear(self, step, results):
        for output in self.scheduler.update(step, results):
            key = output.request_id, output.index
            if self.sources[output.request_id].beam_search is not None:
                found = self._found(self.sources[output.request_id])[output.index]
                assert (output.new_token_ids, output.cumulative_logprob) == (found.token_ids, found.logprob)
                assert output.finish_reason == ("stop" if found.ends_by_token else "length")
                del self.open[key]
                continue
            heard = self.open[key]
            heard += output.new_token_ids
            assert output.finish_reason == self._expected_end(key, heard)
            self._check_prompt_logprobs(output, is_first=len(heard) == len(output.new_token_ids))
            if output.finish_reason is not None:
                del self.open[key]

    def _expected_end(self, key, heard):
        assert heard == self.device.outputs[key][: len(heard)]
        source = self.sources[key[0]]
        params, total = source.params, len(source.prompt_token_ids) + len(heard)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        if heard[-1] in ends and len(heard) > params.min_tokens:
            return "stop"
        return "length" if len(heard) == params.max_tokens or total > self.scheduler.max_sequence_tokens else None

    def _check_prompt_logprobs(self, output, is_first):
        source = self.sources[output.request_id]
        if source.params.prompt_logprobs is None or output.index or not is_first:
            assert output.prompt_logprobs is None
            return
        first, *rest = output.prompt_logprobs
        assert first is None
        assert [entry.token_ids[0] for entry in rest] == source.prompt_token_ids[1:]

    @invariant()
    def check(self):
        scheduler = self.scheduler
        scheduler.check_integrity()
        unfinished = [*scheduler.running, *scheduler.waiting]
        assert {(r.request_id, r.index) for r in unfinished if r.group is None} == {
            key for key in self.open if self.sources[key[0]].beam_search is None
        }
        assert {r.request_id for r in unfinished} == {request_id for request_id, _ in self.open}
        stats = scheduler.stats()
        assert 0 <= stats.wasted_tokens <= len(scheduler.running) * self.pool.page_size * len(self.pool.reaches)
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert stats.offloaded_hits <= stats.offloaded_queries <= stats.prefix_cache_queries

    @invariant()
    def cached_pages_hold_what_their_hash_says(self):
        cache, size = self.pool.prefix_cache, self.pool.page_size
        if cache is None:
            return
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            for group in range(len(self.pool.reaches)):
                prefix = root_of(self.sources[request.request_id], group)
                for place, key in enumerate(keys_of(request, group, self.pool)):
                    page = cache.page_of(key)
                    for offset, token in enumerate(request.token_ids[place * size : (place + 1) * size]):
                        prefix = self.device.prefix(prefix, token)
                        assert page is None or self.device.cells[page][offset] is prefix

    @invariant()
    def offloaded_pages_hold_what_their_hash_says(self):
        host, size = self.pool.host, self.pool.page_size
        if host is None:
            return
        coming = {slot: page for page, slot, _ in host.pending_saves}
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            for group in range(len(self.pool.reaches)):
                prefix = root_of(self.sources[request.request_id], group)
                for place, key in enumerate(keys_of(request, group, self.pool)):
                    slot = host.slot_of(key) if key in host else None
                    held = self.device.cells[coming[slot]] if slot in coming else self.device.slots.get(slot)
                    for offset, token in enumerate(request.token_ids[place * size : (place + 1) * size]):
                        prefix = self.device.prefix(prefix, token)
                        assert slot is None or held[offset] is prefix

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        MET["sequences"] += 1
        MET["preempted"] += self.scheduler.stats().num_preemptions
        longest = self.scheduler.max_sequence_tokens
        # Beams that must take turns for want of pages are computed anew for each token.
        turns = sum(8 * longest for request_id, _ in self.open if self.sources[request_id].beam_search is not None)
        for _ in range(20 + 4 * longest * (1 + len(self.open)) + turns):
            if not self.scheduler.has_unfinished() and not self.launched:
                break
            self.step()
        assert not self.open, "some requests never end"
        assert not self.scheduler.has_unfinished()
        assert self.pool.num_in_use == 0
        assert self.scheduler.reset_prefix_cache()


EngineMachine.TestCase.settings = settings(
    max_examples=2000, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = EngineMachine.TestCase


def test_the_sequences_have_met_everything():
    """Random sequences that never copy, restore or fork anything would prove little."""
    if MET["sequences"] < 2000:
        pytest.skip("the sequences above have not been run")
    rare = {name: MET[name] for name in WHAT_IS_RARE}
    assert min(rare.values()) > 100, rare


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_is_found_again_when_the_conversation_goes_on(depth, ahead):
    """Pages that fill up token by token are cached as well, however deep the pipeline."""
    machine = EngineMachine()
    machine.start(
        num_pages=40, page_size=3, max_num_seqs=2, budget=20, chunked=True, caching=True, max_model_len=60,
        depth=depth, salt=0, partial=(1, 1, 0), ahead=ahead,
    )  # fmt: skip
    chat = {
        "n": 1, "min_tokens": 0, "is_endless": True, "cache_salt": None, "cache_keys": [], "prompt_logprobs": None,
        "own": [], "priority": 0, "timeout": None,
    }  # fmt: skip
    machine.add(shared=4, max_tokens=12, needs_host=False, repeat=False, **chat)
    machine.steps(20)
    assert not machine.open
    machine.add(shared=0, max_tokens=1, needs_host=False, repeat=True, **chat)
    (row,) = machine.scheduler.schedule().rows
    assert len(row.request.token_ids) == 4 + 6
    assert row.start == 9


@pytest.mark.slow
class TestSchedulerAtLength(EngineMachine.TestCase):
    settings = settings(
        max_examples=10_000, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
