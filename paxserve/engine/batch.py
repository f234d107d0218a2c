"""One step's inputs, packed on the host into one int32 buffer and unpacked on the device at fixed offsets.

One buffer is one transfer. What a request keeps from step to step (its page table, its sampling
parameters) lives on the device in a table with a row a slot; only changes to it travel, as pairs of
a flat index and a value, floats as their bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paxserve.engine.decode_steps import NUM_STOP_IDS, DecodeStep
from paxserve.engine.request import Request
from paxserve.engine.step_plan import ScheduledRow, ScheduledStep

PARAM_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "seed_low",
    "seed_high",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "has_bias",
    "has_penalties",
)
"""Columns of the slot table after the page tables; the float ones hold float32 bits."""

NO_SLOT = 2**31 - 1
"""What padding rows have for a slot: out of every range."""


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def param_columns(request: Request) -> list[int]:
    """The request's values for `PARAM_COLUMNS`."""
    params = request.params
    low, high = request.seed_words()
    return [
        0 if params.is_greedy else _float_bits(params.temperature),
        _float_bits(params.top_p),
        _float_bits(params.min_p),
        params.top_k,
        low,
        high,
        _float_bits(params.presence_penalty),
        _float_bits(params.frequency_penalty),
        _float_bits(params.repetition_penalty),
        int(params.has_bias),
        int(params.has_penalties),
    ]


@dataclass(frozen=True)
class Layout:
    """The shape of one compiled step and where each field sits in its packed buffer."""

    num_tokens: int
    """T: most tokens the program computes."""
    num_rows: int
    """R: most requests that share it."""
    num_deltas: int
    """Changes to the slot table that travel with the step; more go ahead of it."""
    is_rich: bool
    """Whether the program can do log-probabilities, penalties and biases."""

    @cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Offset and length of each field, in int32 words."""
        tokens, rows, deltas = self.num_tokens, self.num_rows, self.num_deltas
        lengths = {
            "token_ids": tokens,
            "positions": tokens,
            "cu_q_lens": rows + 1,
            "kv_lens": rows,
            "slots": rows,
            "sample_positions": rows,
            "samples": rows,
            "num_decode_rows": 1,
            "delta_indices": deltas,
            "delta_values": deltas,
        }
        if self.is_rich:
            lengths |= {"target_ids": tokens, "wants_logprobs": 1, "wants_prompt_logprobs": 1}
        offsets, end = {}, 0
        for name, length in lengths.items():
            offsets[name] = (end, length)
            end += length
        return offsets

    @cached_property
    def size(self) -> int:
        """Words in the packed buffer."""
        return sum(length for _, length in self.fields.values())


@dataclass(frozen=True)
class MultiLayout(Layout):
    """The shape of a program that runs several decode steps: the fields of the first, and what ends the rows."""

    num_steps: int
    """Most steps of one run."""

    @property
    def single(self) -> Layout:
        """The shape of each of its steps."""
        return Layout(self.num_tokens, self.num_rows, self.num_deltas, is_rich=False)

    @cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Offset and length of each field, those of one step first."""
        lengths = {"num_iterations": 1, "num_left": self.num_rows, "stop_ids": self.num_rows * NUM_STOP_IDS}
        offsets, end = dict(self.single.fields), self.single.size
        for name, length in lengths.items():
            offsets[name] = (end, length)
            end += length
        return offsets


class SlotTable:
    """What the device's slot table holds, so that only changes are sent."""

    def __init__(self, num_slots: int, max_pages: int, num_groups: int = 1) -> None:
        """A request has `num_groups` page tables of `max_pages` columns."""
        self.num_slots = num_slots
        self.max_pages = max_pages
        self.num_groups = num_groups
        self.width = num_groups * max_pages + len(PARAM_COLUMNS)
        self._owner: list[Request | None] = [None] * num_slots
        self._num_preemptions = [0] * num_slots
        self._num_pages = [0] * num_slots
        self._num_page_changes = [0] * num_slots

    def changes(self, requests: Iterable[Request]) -> tuple[list[int], list[int], list[Request]]:
        """Flat indices and values to write for these requests, and those of them that are new to their slots."""
        indices: list[int] = []
        values: list[int] = []
        newcomers: list[Request] = []
        owners, lives, sizes = self._owner, self._num_preemptions, self._num_pages
        for request in requests:
            slot, num_pages = request.slot, len(request.tables[0])
            if owners[slot] is not request or lives[slot] != request.num_preemptions:
                newcomers.append(request)
                owners[slot], lives[slot], sizes[slot] = request, request.num_preemptions, 0
                first = slot * self.width + self.num_groups * self.max_pages
                indices += range(first, first + len(PARAM_COLUMNS))
                values += param_columns(request)
            if self._num_page_changes[slot] != request.num_page_changes:
                self._num_page_changes[slot] = request.num_page_changes
                sizes[slot] = 0
            known = sizes[slot]
            if known < num_pages:
                base = slot * self.width
                for table in request.tables:
                    indices += range(base + known, base + num_pages)
                    # A place that is out of sight may name any page, but one that there is.
                    values += table[known:] if table[known] >= 0 else [max(page, 0) for page in table[known:]]
                    base += self.max_pages
                sizes[slot] = num_pages
        return indices, values, newcomers


def _tokens_of(row: ScheduledRow) -> list[int]:
    """The row's token ids; a token still on the device is named by its slot, as -1 - slot."""
    request = row.request
    tokens = request.token_ids[row.start : row.start + row.num_tokens]
    if len(tokens) < row.num_tokens:
        tokens.append(-1 - request.slot)
    return tokens


def pack(
    step: ScheduledStep | DecodeStep,
    layout: Layout,
    delta_indices: list[int],
    delta_values: list[int],
    table_size: int,
) -> np.ndarray:
    """The packed int32 buffer of a step; padding rows and tokens are out of every range."""
    buffer = np.zeros(layout.size, np.int32)
    view = {name: buffer[offset : offset + length] for name, (offset, length) in layout.fields.items()}
    view["slots"][:] = NO_SLOT
    view["delta_indices"][:] = table_size
    view["delta_indices"][: len(delta_indices)] = delta_indices
    view["delta_values"][: len(delta_values)] = delta_values
    if isinstance(step, DecodeStep):
        _pack_decodes(step, view)
    else:
        _pack_rows(step, view)
        if layout.is_rich:
            _pack_rich(step, view)
    return buffer


def _pack_decodes(step: DecodeStep, view: dict[str, np.ndarray]) -> None:
    """A token a row, most of it as in the step before."""
    decodes, count = step.decodes, step.num_rows
    view["token_ids"][:count] = step.tokens
    view["positions"][:count] = step.starts
    view["cu_q_lens"][:count] = np.arange(count)
    view["cu_q_lens"][count:] = count
    view["kv_lens"][:count] = step.starts + 1
    view["slots"][:count] = decodes.slots
    view["sample_positions"][:count] = decodes.positions + step.age
    view["samples"][:count] = 1
    view["num_decode_rows"][0] = count
    if step.count > 1:
        view["num_iterations"][0] = step.count
        view["num_left"][:count] = step.num_left
        view["stop_ids"][: decodes.stop_table.size] = decodes.stop_table.ravel()


def _pack_rows(step: ScheduledStep, view: dict[str, np.ndarray]) -> None:
    """Any number of tokens a row, whatever the step before was."""
    rows = step.rows
    count = len(rows)
    num_tokens = [row.num_tokens for row in rows]
    ends = np.cumsum(num_tokens)
    total = int(ends[-1])
    view["cu_q_lens"][1 : count + 1] = ends
    view["cu_q_lens"][count + 1 :] = total
    starts = np.fromiter((row.start for row in rows), np.int32, count)
    view["kv_lens"][:count] = starts + num_tokens
    view["slots"][:count] = [row.request.slot for row in rows]
    view["sample_positions"][:count] = [row.position for row in rows]
    view["samples"][:count] = [row.samples for row in rows]
    view["num_decode_rows"][0] = num_tokens.count(1)
    tokens: list[int] = []
    for row in rows:
        if row.num_tokens == 1 and row.start >= len(row.request.token_ids):
            tokens.append(-1 - row.request.slot)
        else:
            tokens += _tokens_of(row)
    view["token_ids"][:total] = tokens
    view["positions"][:total] = np.repeat(starts - (ends - num_tokens), num_tokens) + np.arange(total)


def _pack_rich(step: ScheduledStep, view: dict[str, np.ndarray]) -> None:
    """What only the rich program reads: the prompt token after each query token, and what is wanted at all."""
    end = 0
    for row in step.rows:
        request = row.request
        if request.wants_prompt_logprobs and row.start < request.prompt_len - 1:
            targets = request.token_ids[row.start + 1 : row.start + 1 + row.num_tokens]
            view["target_ids"][end : end + len(targets)] = targets
            view["wants_prompt_logprobs"][0] = 1
        if request.params.logprobs is not None:
            view["wants_logprobs"][0] = 1
        end += row.num_tokens


def needs_rich(step: ScheduledStep) -> bool:
    """Whether some row wants what only the rich program does."""
    for row in step.rows:
        request = row.request
        if row.samples and not request.is_plain_at(row.position):
            return True
        if request.wants_prompt_logprobs and row.start < request.prompt_len - 1:
            return True
    return False
