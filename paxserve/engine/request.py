"""The engine's own record of one sequence: its tokens, its pages, how far it has been computed."""

import dataclasses
import enum
from typing import TYPE_CHECKING

import numpy as np

from paxserve.engine.prefix_cache import page_hash, root_hash
from paxserve.messages import EngineRequest, TokenLogprobs
from paxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paxserve.engine.beam_group import BeamGroup


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One sequence: a request, or one of the `n` choices of a request.

    `num_computed` counts tokens whose keys and values are in the pool or will be once every launched
    step has run. `num_pending` counts sampled tokens that exist on the device but have not been read;
    they are part of `num_tokens` although their ids are unknown here.
    """

    def __init__(self, source: EngineRequest, *, index: int = 0, seed: int, arrival: int) -> None:
        self._source = source
        self.request_id = source.request_id
        self.index = index
        self.rank = (source.priority, arrival, index)
        """Its place among the others, the lowest first: it waits, and keeps its pages, before those of a higher one."""
        self.params: SamplingParams = source.params
        self.seed = seed
        self.arrival = arrival
        self.prompt_len = len(source.prompt_token_ids)
        self.token_ids: list[int] = list(source.prompt_token_ids)
        self.stop_token_ids = source.params.all_stop_token_ids
        self.max_tokens = source.params.max_tokens
        self.most_tokens = 0
        """Tokens of prompt and output at which it ends by length; the scheduler knows all the limits."""
        self.needs_host_tokens = any(len(word) > 1 for word in source.params.bad_words_token_ids)
        """Whether the next sampling depends on tokens the host must have read (words of several tokens)."""
        self.group: BeamGroup | None = None
        """The beam search that this is one beam of."""
        self.is_held = False
        """Whether this beam has reported its candidates and waits for the others'."""
        self.leader: Request | None = None
        """The choice whose prompt pages this one shares, until it has its own start."""
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.num_computed = 0
        self.num_pending = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time = 0.0
        self.tables: list[list[int]] = [[]]
        """Its page tables, of one length: see `page_tables`."""
        self.first_pages = [0]
        """For each kind of tables, the first place that has a page; those before it were given back."""
        self.shares_last_page = False
        """Whether the pages that its next token goes to came from another request."""
        self.num_page_changes = 0
        """How often a page in the middle of a table was exchanged for another."""
        self.slot = -1
        # Prompt log-probabilities are asked of the first choice alone: the prompt is the same for all.
        self.wants_prompt_logprobs = source.params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._root_hash = root_hash(source.cache_salt, *source.cache_keys)
        self._page_hashes: list[bytes] = []

    @property
    def output_len(self) -> int:
        """Output tokens, those still on the device included."""
        return len(self.token_ids) - self.prompt_len + self.num_pending

    @property
    def num_tokens(self) -> int:
        """All tokens, those still on the device included."""
        return len(self.token_ids) + self.num_pending

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens read so far."""
        return self.token_ids[self.prompt_len :]

    @property
    def pages(self) -> list[int]:
        """The first page table, which is as long as each of them."""
        return self.tables[0]

    @property
    def is_finished(self) -> bool:
        """Whether no further token is wanted."""
        return self.status is Status.FINISHED

    def is_plain_at(self, position: int) -> bool:
        """Whether the token at this output position is sampled from unchanged logits, without log-probabilities."""
        params = self.params
        if params.logprobs is not None or params.has_penalties:
            return False
        return not params.has_bias or (position >= params.min_tokens and not params.has_lasting_bias)

    @property
    def has_all_tokens_planned(self) -> bool:
        """Whether the length limit is reached by the tokens that are read or on their way."""
        return self.max_tokens is not None and self.output_len >= self.max_tokens

    def page_hashes(self, count: int, page_size: int) -> list[bytes]:
        """The hash chain of the first `count` pages, all of whose tokens must be known."""
        hashes = self._page_hashes
        while len(hashes) < count:
            start = len(hashes) * page_size
            parent = hashes[-1] if hashes else self._root_hash
            hashes.append(page_hash(parent, self.token_ids[start : start + page_size]))
        return hashes[:count]

    def hash_of_page(self, page: int, page_size: int) -> bytes:
        """The hash of the page with this index, all of whose tokens must be known."""
        if page >= len(self._page_hashes):
            self.page_hashes(page + 1, page_size)
        return self._page_hashes[page]

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Take in what the tokens from place `start` on tell of those behind them."""
        for position, entry in enumerate(entries, start=start + 1):
            # A preempted prompt is computed twice; its tokens' numbers are taken once.
            if position == len(self.prompt_logprobs) < self.prompt_len:
                self.prompt_logprobs.append(entry)

    def copy(self, index: int) -> "Request":
        """A request of its own with the same tokens, which holds nothing yet and waits."""
        child = Request(self._source, index=index, seed=self.seed, arrival=self.arrival)
        child.params, child.stop_token_ids = self.params, self.stop_token_ids
        child.token_ids = list(self.token_ids)
        child.rank = (self.rank[0], self.arrival, index)
        child.most_tokens, child.needs_host_tokens, child.group = self.most_tokens, self.needs_host_tokens, self.group
        child.num_cached_tokens, child.first_scheduled_time = self.num_cached_tokens, self.first_scheduled_time
        child._page_hashes = list(self._page_hashes)
        return child

    def seed_words(self) -> tuple[int, int]:
        """The seed as two int32 bit patterns, low word first."""
        low, high = np.frombuffer(np.uint64(self.seed % 2**64).tobytes(), dtype=np.int32)
        return int(low), int(high)


def expand_choices(source: EngineRequest, seeds: list[int], arrival: int) -> list[Request]:
    """One sequence for each of the `n` choices; all but the first share the first one's prompt pages."""
    leader = Request(source, seed=seeds[0], arrival=arrival)
    if source.params.n == 1:
        return [leader]
    plain = dataclasses.replace(source, params=dataclasses.replace(source.params, prompt_logprobs=None))
    choices = [leader]
    for index, seed in enumerate(seeds[1:], start=1):
        choice = Request(plain, index=index, seed=seed, arrival=arrival)
        choice.leader = leader
        choices.append(choice)
    return choices
