"""The engine's loop around the scheduler and a `paged_device`; its answers must be those that the samples come to."""

from collections import Counter, deque

from paxserve.engine.beam_search import BeamSearch
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.scheduler import Scheduler
from tests.paxserve.engine.paged_device import EOS, Contents, Device, cut, keys_of

MET = Counter()
"""How often something has happened, over all sequences of this process."""


class CheckedLoop:
    """Steps of an engine, each checked against what was asked; `open` are the choices that have not ended."""

    def prepare(self, depth, salt, options):
        """`options` are the scheduler's; `depth` steps are launched before the first is read."""
        self.options = options
        self.depth = depth
        self.salt = salt
        self.contents = Contents()
        self.outputs = {}
        self.sources = {}
        self.now = 0

    def boot(self, pool):
        """A new process: everything but what was asked so far begins anew."""
        self.pool = pool
        self.scheduler = Scheduler(pool, **self.options)
        self.device = Device(pool, self.salt, self.contents, self.outputs)
        self.deadlines = {}
        self.open = {}
        """Tokens heard so far of each choice that has not ended."""
        self.launched = deque()
        self.num_idle = 0

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
            self.launched.append((scheduled, run(scheduled, self.sources)))
        elif not self.launched and self.pool.disk is not None and self.pool.disk.num_reads:
            self.pool.disk.wait(1)
            return
        if self.launched and (scheduled is None or len(self.launched) >= self.depth):
            self._hear(*self.launched.popleft())
            self.check()
        elif scheduled is None:
            self.num_idle += 1
            # A step may do nothing but preempt; two in a row with requests left would be a deadlock.
            assert self.num_idle < 2 or not self.scheduler.has_unfinished()
            return
        self.num_idle = 0

    def finish(self):
        """Answer what is open; nothing may be left behind."""
        longest = self.scheduler.max_sequence_tokens
        # Beams that must take turns for want of pages are computed anew for each token.
        turns = sum(8 * longest for request_id, _ in self.open if self.sources[request_id].beam_search is not None)
        reads = 0 if self.pool.disk is None else longest * (1 + len(self.open)) * len(self.pool.reaches)
        for _ in range(20 + 4 * longest * (1 + len(self.open)) + turns + reads):
            if not self.scheduler.has_unfinished() and not self.launched:
                break
            self.step()
        assert not self.open, "some requests never end"
        assert not self.scheduler.has_unfinished()
        assert self.pool.num_in_use == 0

    def _check_decodes(self, step):
        assert step.num_rows == len(self.scheduler.running) <= self.scheduler.max_num_batched_tokens
        assert 1 <= step.count <= self.scheduler.num_scheduler_steps
        assert step.counts.min() >= 1
        assert step.counts.max() == step.count
        assert step.count == 1 or not self.scheduler.waiting, "somebody waits for several steps"
        MET["saved"] += len(step.page_saves)
        MET["decodes"] += step.num_rows
        MET["decodes ahead"] += step.num_tokens - step.num_rows

    def _check_step(self, step):
        options = self.options
        assert 0 < step.num_tokens <= options["max_num_batched_tokens"]
        assert len({row.request for row in step.rows}) == len(step.rows) <= options["max_num_seqs"]
        assert len({row.request.slot for row in step.rows}) == len(step.rows)
        assert all(row.num_tokens > 0 for row in step.rows)
        is_long = [row.num_tokens > 1 for row in step.rows]
        assert is_long == sorted(is_long), "decode rows come first"
        if threshold := options["prefill"].long_prefill_token_threshold:
            assert all(row.num_tokens <= threshold for row in step.rows)
        for row in step.rows:
            assert row.request.num_cached_tokens < row.request.prompt_len
            if row.request.needs_host_tokens and row.samples:
                assert row.request.num_pending == 1, "the tokens before must have been read"

    def _count(self, step):
        MET["saved"] += len(step.page_saves)
        MET["restored"] += len(step.page_loads)
        MET["from disk"] += len(step.page_fills)
        MET["copied"] += len(step.page_copies)
        MET["prefix hits"] += sum(row.start == row.request.num_cached_tokens > 0 for row in step.rows)
        MET["forked beams"] += sum(row.request.group is not None and row.request.index > 0 for row in step.rows)

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

    def _found(self, source):
        """What the search comes to, found without pages or steps."""
        search = BeamSearch(source.beam_search, source.params.all_stop_token_ids, source.params.max_tokens)
        beams = [[]]
        while beams:
            candidates = [self.device.candidates(source.prompt_token_ids + tokens) for tokens in beams]
            chosen = search.advance(beams, [cut(entry, search.num_candidates) for entry in candidates])
            beams = [[*beams[c.beam], c.token] for c in chosen]
        return search.hypotheses

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

    def check(self):
        """Assert that the scheduler's books agree with each other and with what is open."""
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

    def check_contents(self):
        """Assert that what is found under the hash of a request's page holds just that, on the device and elsewhere."""
        pool, size = self.pool, self.pool.page_size
        if pool.prefix_cache is None:
            return
        coming = {} if pool.host is None else {slot: page for page, slot, _ in pool.host.pending_saves}
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            for group in range(len(pool.reaches)):
                prefix = self.contents.root(self.sources[request.request_id], group)
                for place, key in enumerate(keys_of(request, group, pool)):
                    holders = list(self._holders(key, coming))
                    for offset, token in enumerate(request.token_ids[place * size : (place + 1) * size]):
                        prefix = self.contents.after(prefix, token)
                        assert all(cells[offset] is prefix for cells in holders)

    def _holders(self, key, coming):
        """The cells that are kept for a hash on the device, in host memory (or are on their way there), on disk."""
        pool, device = self.pool, self.device
        page = pool.prefix_cache.page_of(key)
        if page is not None:
            yield device.cells[page]
        if pool.host is not None and key in pool.host:
            slot = pool.host.slot_of(key)
            yield device.cells[coming[slot]] if slot in coming else device.slots[slot]
        if pool.disk is not None and (content := pool.disk.folder.held(key)) is not None:
            yield self.contents.unpack(content)
