"""Random lives of requests against the scheduler and its pages: the rules of a hypothesis machine."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from models.layer_groups import Reach
from paxserve.beam_search_params import BeamSearchParams
from paxserve.engine.beam_group import first_beam
from paxserve.engine.host_tier import HostTier
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.prefill_limits import PrefillLimits
from paxserve.engine.request import expand_choices
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams
from tests.paxserve.engine.checked_loop import MET, CheckedLoop
from tests.paxserve.engine.paged_device import EMPTY, EOS, STOP

GROUPS = [
    (Reach(),),
    (Reach(),),
    (Reach(window=3),),
    (Reach(), Reach(window=4), Reach(window=4)),
    (Reach(window=2), Reach(window=7)),
    (Reach(), Reach(), Reach(window=1), Reach(chunk=12)),
]
SHARED = [5, 6, 7, 7, 6, 5, 5, 6, 6, 7, 5, 7]


SETTINGS = {
    "num_pages": st.integers(2, 24),
    "page_size": st.sampled_from([1, 2, 3, 4]),
    "max_num_seqs": st.integers(1, 6),
    "budget": st.integers(1, 20),
    "chunked": st.booleans(),
    "caching": st.booleans() | st.just(True),
    "max_model_len": st.integers(6, 60),
    "depth": st.sampled_from([1, 2, 2, 3]),
    "salt": st.integers(0, 10**6),
    "partial": st.sampled_from([(1, 1, 0), (1, 1, 0), (1, 1, 3), (2, 1, 3), (3, 3, 2)]),
    "num_slots": st.sampled_from([0, 1, 3, 8, 30]),
    "reaches": st.sampled_from(GROUPS),
    "ahead": st.sampled_from([1, 1, 2, 5]),
}
"""What a machine begins with."""


class EngineMachine(CheckedLoop, RuleBasedStateMachine):
    """Requests come, end, lose their pages and miss their deadlines; pages are taken, go to host memory and return."""

    @initialize(**SETTINGS)
    def start(
        self, num_pages, page_size, max_num_seqs, budget, chunked, caching, max_model_len, depth, salt, partial,
        num_slots=0, reaches=GROUPS[0], ahead=1,
    ):  # fmt: skip
        num_partial, num_long, threshold = partial if chunked else (1, 1, 0)
        self.prepare(depth, salt, {
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max(budget, max_num_seqs),
            "max_model_len": max_model_len, "num_scheduler_steps": ahead,
            "prefill": PrefillLimits(
                enable_chunked_prefill=chunked, max_num_partial_prefills=num_partial,
                max_long_partial_prefills=num_long, long_prefill_token_threshold=threshold,
            ),
        })  # fmt: skip
        self.pages = {
            "num_pages": num_pages * len(reaches), "page_size": page_size, "enable_prefix_caching": caching,
            "reaches": reaches,
        }  # fmt: skip
        self.num_slots = num_slots if caching else 0
        self.boot(self.new_pool())

    def new_pool(self):
        return PagePool(**self.pages, host=HostTier(self.num_slots) if self.num_slots else None)

    # Requests

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
        prompt = SHARED[:shared] + own
        if repeat and self.sources:  # a prompt that goes on where an earlier answer ended, as in a chat
            prompt = self._conversation() + own
        params = SamplingParams(
            n=n, temperature=1.0, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens or 3),
            ignore_eos=is_endless, eos_token_ids=[EOS], stop_token_ids=[] if is_endless else [STOP],
            prompt_logprobs=prompt_logprobs,
        )  # fmt: skip
        if needs_host:
            params.bad_words_token_ids = [[5, 6]]
        deadline = None if timeout is None else self.now + timeout
        self.ask(prompt or [5], params, deadline, cache_salt=cache_salt, cache_keys=cache_keys, priority=priority)

    def ask(self, prompt, params, deadline=None, **facts):
        request_id, number = f"r{len(self.sources)}", len(self.sources)
        prompt = prompt[: self.scheduler.max_sequence_tokens]
        source = EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, arrival_time=0.0, **facts)
        self.sources[request_id] = source
        seeds = [100 * number + index for index in range(params.n)]
        self.scheduler.add(expand_choices(source, seeds, number), deadline)
        if deadline is not None:
            self.deadlines[request_id] = deadline
        self.open.update({(request_id, index): [] for index in range(params.n)})

    def _conversation(self):
        (request_id, _), outputs = next(iter(self.outputs.items()), (("r0", 0), []))
        return self.sources[request_id].prompt_token_ids + outputs[:6]

    @rule(
        shared=st.integers(1, 12),
        own=st.lists(st.integers(5, 7), max_size=4),
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 8),
        early_stopping=st.sampled_from([True, False, "never"]),
        priority=st.sampled_from([0, 0, -1]),
    )
    def add_search(self, shared, own, width, max_tokens, early_stopping, priority):
        width = min(width, self.scheduler.max_num_seqs)
        prompt = SHARED[:shared] + own
        prompt = prompt[: max(1, self.scheduler.max_sequence_tokens - max_tokens)]
        max_tokens = min(max_tokens, self.scheduler.max_sequence_tokens - len(prompt) + 1)
        params = SamplingParams(
            n=width, temperature=1.0, max_tokens=max_tokens, eos_token_ids=[EOS], stop_token_ids=[STOP]
        )
        beams = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=early_stopping)
        request_id, number = f"r{len(self.sources)}", len(self.sources)
        source = EngineRequest(
            request_id=request_id, prompt_token_ids=prompt, params=params, arrival_time=0.0, priority=priority,
            beam_search=beams,
        )  # fmt: skip
        self.sources[request_id] = source
        self.scheduler.add([first_beam(source, number, self.scheduler.max_sequence_tokens)])
        self.open.update({(request_id, index): [] for index in range(width)})

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

    @rule(count=st.integers(1, 6), loser=st.sampled_from([None, None, None, 0, 1, 5]))
    def steps(self, count, loser=None):
        """Perhaps somebody loses its pages in mid-life, and perhaps with tokens on their way."""
        for _ in range(count):
            self.step()
        if loser is not None and (running := self.scheduler.running):
            self.scheduler._preempt(running[loser % len(running)])

    # Pages

    @precondition(lambda self: self.pool.num_free)
    @rule(count=st.integers(1, 24), is_all=st.booleans())
    def evict(self, count, is_all):
        """Somebody else takes free pages for a moment: what they held is gone."""
        self.retire(self.pool.num_free if is_all else min(count, self.pool.num_free))

    def retire(self, count):
        pages = self.pool.allocate(count)
        if self.pool.host is not None:
            saves, loads = self.pool.host.take_moves()
            assert not loads
            self.device.save(saves)
        for page in pages:
            self.device.cells[page] = [EMPTY] * self.pool.page_size
        self.pool.release(pages)

    @rule()
    def reset(self):
        in_use = self.pool.num_in_use
        assert self.scheduler.reset_prefix_cache() == (in_use == 0)
        if in_use == 0 and self.pool.prefix_cache is not None:
            self.contents.generation += 1
            assert len(self.pool.prefix_cache) == 0

    # What must hold

    @invariant()
    def books_agree(self):
        self.check()

    @invariant()
    def pages_hold_what_their_hash_says(self):
        self.check_contents()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        MET["sequences"] += 1
        MET["preempted"] += self.scheduler.stats().num_preemptions
        self.finish()
        assert self.scheduler.reset_prefix_cache()
