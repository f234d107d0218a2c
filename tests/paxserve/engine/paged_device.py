"""A device for the scheduler that computes nothing and remembers what each page holds, as do host memory and disk."""

import random
from collections import deque

import numpy as np

from paxserve.engine.page_tables import NO_PAGE
from paxserve.engine.step_plan import RowResult, ScheduledRow, ScheduledStep
from paxserve.messages import TokenLogprobs

EOS, STOP = 0, 1
EMPTY = None
PAGE_BYTES = 8
"""Bytes of a page on disk: its number."""


def cut(entry, count):
    """The sampled token and the `count` most likely ones."""
    return TokenLogprobs(entry.token_ids[: count + 1], entry.logprobs[: count + 1], entry.rank)


def keys_of(request, group, pool):
    """What the request's full pages of a group are found by."""
    suffix = bytes([group]) if len(pool.reaches) > 1 else b""
    return [digest + suffix for digest in request.page_hashes(len(request.token_ids) // pool.page_size, pool.page_size)]


class Contents:
    """What cells may hold: prefixes, one object each, so that comparing is cheap.

    A prefix is a linked pair (prefix before, token), starting at the page's group, the request's salt and keys, and the
    generation: equal cells mean equal tokens all the way down, and all the rest equal.
    """

    def __init__(self):
        self.generation = 0
        """Changes when everything is to be forgotten: nothing from before may be found."""
        self._roots = {}
        self._interned = {}
        self._pages = []

    def root(self, source, group):
        """What a group's prefixes of a request start from."""
        return self._roots.setdefault((self.generation, group, source.cache_salt, *source.cache_keys), object())

    def after(self, before, token):
        """The prefix with one token more."""
        return self._interned.setdefault((id(before), token), (before, token))

    def pack(self, cells):
        """A page as bytes."""
        self._pages.append(cells)
        return (len(self._pages) - 1).to_bytes(PAGE_BYTES, "little")

    def unpack(self, page):
        """The cells of such bytes."""
        return list(self._pages[int.from_bytes(page, "little")])


class Device:
    """Runs steps in the order of their launch."""

    def __init__(self, pool, salt, contents, outputs):
        self.pool = pool
        self.contents = contents
        self.cells = [[EMPTY] * pool.page_size for _ in range(pool.num_pages)]
        self.slots = {}
        """What each place in host memory holds."""
        self.salt = salt
        self.outputs = outputs
        """Every token ever sampled, by (request id, choice)."""
        self._last_tokens = {}
        """What each slot sampled last: (request id, choice) and index in the sequence."""
        self._arriving = deque()
        """What is on its way through host memory to the disk: key, content, and when it was sent."""

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

    def run(self, step, sources):
        """Save, load and copy pages, check what rows will read, write what they compute, sample."""
        self.save(step.page_saves)
        targets = [page for _, page in (*step.page_loads, *step.page_fills)]
        assert len(set(targets)) == len(targets), "one page is to hold two loads"
        for slot, page in step.page_loads:
            self.cells[page] = list(self.slots[slot])
        for content, page in step.page_fills:
            self.cells[page] = self.contents.unpack(content)
        targets = [target for _, target in step.page_copies]
        assert len(set(targets)) == len(targets), "one page is to hold two copies"
        for source, target in step.page_copies:
            assert self.pool.ref_count(target) == 1
            self.cells[target] = list(self.cells[source])
        written, plans = {}, []
        for row in step.rows:
            plans.append((row, self._plan(row, sources[row.request.request_id], written)))
        read = {row.request: {page for table in row.request.tables for page in table} for row in step.rows}
        for page, writer in written.items():
            others = [r for r, pages in read.items() if r is not writer and page in pages]
            assert not others, f"page {page} is written while another row reads it"
        return [self._compute(row, plan, sources[row.request.request_id]) for row, plan in plans]

    def run_decodes(self, step, sources):
        """What a program of decode steps hands over, [K, R]: -1 once a row has ended."""
        tokens = np.full((step.count, step.num_rows), -1)
        for iteration in range(step.count):
            places = [place for place, count in enumerate(step.counts) if iteration < count]
            rows = [self._row(step, place, iteration) for place in places]
            ended = [step.count > 1 and self._has_ended(row.request) for row in rows]
            moves = (step.page_saves, step.page_loads) if iteration == 0 else ([], [])
            results = self.run(ScheduledStep(rows, [], *moves), sources)
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
        """Take pages into host memory; those of the steps before have arrived there by then."""
        self.settle()
        disk = self.pool.disk
        for page, slot, key in saves:
            self.slots[slot] = list(self.cells[page])
            if disk is not None:
                self._arriving.append((key, self.slots[slot], disk.epoch))

    def settle(self):
        """Hand the disk what has arrived."""
        while self._arriving:
            key, cells, epoch = self._arriving.popleft()
            self.pool.disk.keep(key, [memoryview(self.contents.pack(cells))], epoch)

    def _plan(self, row, source, written):
        request, size = row.request, self.pool.page_size
        tokens = self.tokens_of(request, source)
        assert request.token_ids == tokens[: len(request.token_ids)]
        end = row.start + row.num_tokens
        assert end <= len(tokens)
        assert row.samples == (end == len(tokens))
        plan = []
        for group, (table, reach) in enumerate(zip(request.tables, self.pool.reaches, strict=True)):
            prefix = self.contents.root(source, group)
            for i, token in enumerate(tokens[:end]):
                prefix = self.contents.after(prefix, token)
                page = table[i // size]
                if i >= row.start:
                    assert self.pool.ref_count(page) == 1, f"page {page} is written but shared"
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
