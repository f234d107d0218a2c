"""The device side of the engine: compiles every program up front, launches steps, reads their results."""

from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from pallas_kernels.ragged_paged_attention import copy_pages, make_pool
from paxserve.config import EngineConfig
from paxserve.engine.batch import Layout, SlotTable, needs_rich, pack
from paxserve.engine.buckets import fitting, is_essential, plain_layouts, rich_layouts
from paxserve.engine.logit_bias import BiasState, bias_row, bias_state
from paxserve.engine.program_cache import ProgramCache
from paxserve.engine.programs import Programs
from paxserve.engine.request import Request
from paxserve.engine.scheduler import RowResult, ScheduledStep
from paxserve.engine.step import DeviceState, RichState, StepOutput, StepShape, make_step
from paxserve.messages import TokenLogprobs

NUM_UPDATES = 1024
"""Slot-table changes that one run of the `update` program applies."""

NUM_COPIES = 64
"""Pages that one run of the `copy` program copies."""


class Launched(NamedTuple):
    """A step on the device whose results have not been read."""

    step: ScheduledStep
    layout: Layout
    out: StepOutput


class ModelRunner:
    """Owns the weights, the KV pool and the device state of one engine."""

    def __init__(self, model: nnx.Module, config: EngineConfig, *, num_pages: int, max_model_len: int) -> None:
        cache = config.cache
        num_slots, budget = config.scheduler.limits
        graphdef, params = nnx.split(model)
        self._weights, treedef = jax.tree.flatten(params)
        self._graphdef, self._treedef = graphdef, treedef
        vocab_size = model.config.vocab_size  # type: ignore[attr-defined]
        spec = model.cache_spec  # type: ignore[attr-defined]
        max_pages = -(-max_model_len // cache.block_size)
        top = config.model.max_logprobs
        self.shape = StepShape(
            num_slots=num_slots,
            max_pages=max_pages,
            vocab_size=vocab_size,
            num_top_logprobs=vocab_size if top == -1 else min(top, vocab_size),
            backend=config.compile.attention_backend,
        )
        kv_dtype = config.cache.kv_cache_dtype
        self._make_pool = partial(
            make_pool, self.shape.backend, num_layers=spec.num_layers, num_pages=num_pages, page_size=cache.block_size,
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            dtype=jnp.dtype(config.model.dtype if kv_dtype == "auto" else kv_dtype),
        )  # fmt: skip
        self._num_pages = num_pages
        self._identity = (type(model), model.config, max_model_len, config.compile.layer_execution)  # type: ignore[attr-defined]
        self._slots = SlotTable(self.shape.num_slots, max_pages)
        self._bias_states: dict[int, tuple[Request, BiasState]] = {}
        self._limits = (budget, num_slots)
        sizes = (*self._limits, cache.block_size, config.compile.compile_sizes)
        self._plain, self._rich_layouts = plain_layouts(*sizes), rich_layouts(*sizes)
        self._programs: Programs
        self._pool: Any = None
        self._state: DeviceState
        self._rich: RichState

    @property
    def num_programs(self) -> int:
        """Compiled programs, helpers included."""
        return len(self._programs)

    def wait_for_programs(self) -> None:
        """Return once the programs that are compiled in the background are there too."""
        self._programs.wait()

    # Start

    def compile(self, cache_folder: Path | None) -> None:
        """Allocate the device state and compile the programs, or load them; all but the essential in the background."""
        shape = self.shape
        size = shape.num_slots * shape.width
        self._pool = jax.jit(self._make_pool)()
        arrays = [(leaf.shape, str(leaf.dtype)) for leaf in (*self._weights, *jax.tree.leaves(self._pool))]
        cache = ProgramCache(cache_folder, *self._identity, shape, arrays)
        slots, slots_by_vocab = shape.num_slots, (shape.num_slots, shape.vocab_size)
        self._state = DeviceState(_zeros(size, np.int32), _zeros(slots, np.int32))
        self._rich = RichState(
            _zeros(slots_by_vocab, np.float32), _zeros(slots_by_vocab, np.int32), _zeros(slots_by_vocab, np.bool_)
        )
        # The steps' arguments are donated as soon as one runs; those compiled in the background only need their shapes.
        weights, pool, state, rich = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self._weights, self._pool, self._state, self._rich)
        )
        jobs: dict[Hashable, Callable[[], Any]] = {
            layout: partial(self._compile_step, layout, weights, pool, state, rich if layout.is_rich else None)
            for layout in (*self._plain, *self._rich_layouts)
        }
        needed = {layout: jobs.pop(layout) for layout in self._plain if is_essential(layout, *self._limits)}
        self._programs = Programs(cache, needed | self._helper_jobs(pool, state, rich), jobs)

    def _helper_jobs(self, pool: Any, state: Any, rich: Any) -> dict[Hashable, Callable[[], Any]]:
        """What to compile for the small programs that run ahead of a step, by name."""
        shape, abstract = self.shape, jax.ShapeDtypeStruct
        pairs, copies = abstract((NUM_UPDATES,), jnp.int32), abstract((NUM_COPIES,), jnp.int32)
        slot, row = abstract((), jnp.int32), partial(abstract, (shape.vocab_size,))
        helpers = {
            "update": (_update_table, (state, pairs, pairs)),
            "copy": (partial(copy_pages, backend=shape.backend), (pool, copies, copies)),
            "bias": (_set_bias, (rich, slot, row(jnp.float32))),
            "counts": (_set_counts, (rich, slot, row(jnp.int32), row(bool))),
        }
        jobs: dict[Hashable, Callable[[], Any]] = {}
        for name, (function, arguments) in helpers.items():
            lower = jax.jit(function, donate_argnums=0).lower
            jobs[name] = lambda lower=lower, arguments=arguments: lower(*arguments).compile()
        return jobs

    def _compile_step(self, layout: Layout, weights: Any, pool: Any, state: Any, rich: Any) -> Any:
        step = make_step(self._graphdef, self._treedef, layout, self.shape)
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        return jax.jit(step, donate_argnums=(1, 2, 3)).lower(weights, pool, state, rich, packed).compile()

    # One step

    def launch(self, step: ScheduledStep) -> Launched:
        """Start a step on the device without waiting for it or for any step before it."""
        is_rich = needs_rich(step)
        layouts = fitting(self._rich_layouts if is_rich else self._plain, step.num_tokens, len(step.rows))
        layout: Layout = self._programs.choose(layouts)
        if step.page_copies:
            self._copy_pages(step.page_copies)
        indices, values = self._table_changes(step, layout)
        if is_rich:
            self._update_biases(step)
        packed = pack(step, layout, indices, values, self._state.table.shape[0])
        rich = self._rich if is_rich else None
        self._pool, self._state, rich, out = self._programs[layout](
            self._weights, self._pool, self._state, rich, packed
        )
        if rich is not None:
            self._rich = rich
        out.tokens.copy_to_host_async()
        return Launched(step, layout, out)

    def read(self, launched: Launched) -> list[RowResult]:
        """Wait for a step and return what it found, a result for each of its rows."""
        step, out = launched.step, launched.out
        results = [RowResult(int(token)) for token in np.asarray(out.tokens)[: len(step.rows)]]
        if launched.layout.is_rich:
            self._read_logprobs(step, out, results)
        return results

    def _read_logprobs(self, step: ScheduledStep, out: StepOutput, results: list[RowResult]) -> None:
        params = [row.request.params for row in step.rows]
        if any(row.samples and p.logprobs is not None for row, p in zip(step.rows, params, strict=True)):
            arrays = _host(out.logprobs)
            for index, (result, p) in enumerate(zip(results, params, strict=True)):
                if p.logprobs is not None:
                    result.logprobs = _entry(arrays, index, result.token_id, p.logprobs, self.shape)
        end, arrays = 0, None
        for row, result in zip(step.rows, results, strict=True):
            request = row.request
            first, end = end, end + row.num_tokens
            if not request.wants_prompt_logprobs or row.start >= request.prompt_len - 1:
                continue
            arrays = arrays or _host(out.prompt_logprobs)
            wanted = request.params.prompt_logprobs
            assert wanted is not None
            targets = request.token_ids[row.start + 1 : min(row.start + row.num_tokens + 1, request.prompt_len)]
            result.prompt_logprobs = [
                _entry(arrays, first + i, token, wanted, self.shape) for i, token in enumerate(targets)
            ]

    # What travels ahead of a step

    def _table_changes(self, step: ScheduledStep, layout: Layout) -> tuple[list[int], list[int]]:
        """Changes small enough to travel with the step; what is more goes ahead of it."""
        indices: list[int] = []
        values: list[int] = []
        for row in step.rows:
            new_indices, new_values, is_new = self._slots.changes(row.request)
            indices += new_indices
            values += new_values
            if is_new and row.request.params.has_penalties:
                self._set_counts(row.request)
        while len(indices) > layout.num_deltas:
            self._send_changes(indices[:NUM_UPDATES], values[:NUM_UPDATES])
            indices, values = indices[NUM_UPDATES:], values[NUM_UPDATES:]
        return indices, values

    def _send_changes(self, indices: list[int], values: list[int]) -> None:
        padded = np.full((2, NUM_UPDATES), self._state.table.shape[0], np.int32)
        padded[0, : len(indices)] = indices
        padded[1, : len(values)] = values
        self._state = self._programs["update"](self._state, padded[0], padded[1])

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        for start in range(0, len(copies), NUM_COPIES):
            chunk = np.array(copies[start : start + NUM_COPIES], np.int32)
            padded = np.full((2, NUM_COPIES), self._num_pages, np.int32)
            padded[:, : len(chunk)] = chunk.T
            self._pool = self._programs["copy"](self._pool, padded[0], padded[1])

    def _set_counts(self, request: Request) -> None:
        """Tell the device which tokens a request with penalties has seen so far."""
        size = self.shape.vocab_size
        counts = np.bincount(request.output_token_ids, minlength=size).astype(np.int32)
        in_prompt = np.zeros(size, bool)
        in_prompt[request.token_ids[: request.prompt_len]] = True
        self._rich = self._programs["counts"](self._rich, np.int32(request.slot), counts, in_prompt)

    def _update_biases(self, step: ScheduledStep) -> None:
        """Send the bias row of every biased request whose row has changed since it was last sent."""
        for row in step.rows:
            request = row.request
            if not (row.samples and request.params.has_bias):
                continue
            state = bias_state(request, row.position)
            if self._bias_states.get(request.slot) == (request, state):
                continue
            self._bias_states[request.slot] = (request, state)
            bias = bias_row(request, state, self.shape.vocab_size)
            self._rich = self._programs["bias"](self._rich, np.int32(request.slot), bias)


def _zeros(shape: int | tuple[int, ...], dtype: type[np.generic]) -> Array:
    """Zeros on the device by a transfer: every shape of `jnp.zeros` would be a program to compile."""
    return jax.device_put(np.zeros(shape, dtype))


def _update_table(state: DeviceState, indices: Array, values: Array) -> DeviceState:
    return state._replace(table=state.table.at[indices].set(values, mode="drop"))


def _set_bias(rich: RichState, slot: Array, bias: Array) -> RichState:
    return rich._replace(bias=rich.bias.at[slot].set(bias))


def _set_counts(rich: RichState, slot: Array, counts: Array, in_prompt: Array) -> RichState:
    return rich._replace(
        output_counts=rich.output_counts.at[slot].set(counts), in_prompt=rich.in_prompt.at[slot].set(in_prompt)
    )


def _host(arrays: Any) -> Any:
    return jax.tree.map(np.asarray, arrays)


def _entry(arrays: Any, index: int, token: int, wanted: int, shape: StepShape) -> TokenLogprobs:
    """One position's log-probabilities: the token itself, then the `wanted` most likely ones."""
    chosen, rank, top_ids, top_logprobs = (array[index] for array in arrays)
    count = shape.num_top_logprobs if wanted == -1 else wanted
    return TokenLogprobs([token, *top_ids[:count].tolist()], [float(chosen), *top_logprobs[:count].tolist()], int(rank))
