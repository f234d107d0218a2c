"""The device side of the engine: compiles every program up front, launches steps, reads their results."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from pallas_kernels.ragged_paged_attention import PageContent
from paxserve.config import EngineConfig
from paxserve.engine.batch import Layout, SlotTable, needs_rich, pack
from paxserve.engine.buckets import fitting
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.host_pages import HostPages
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.logit_bias import BiasState, bias_row, bias_state
from paxserve.engine.program_cache import ProgramCache
from paxserve.engine.program_specs import NUM_COPIES, NUM_MOVES, NUM_UPDATES, ProgramSpecs
from paxserve.engine.programs import Programs
from paxserve.engine.request import Request
from paxserve.engine.step import DeviceState, RichState, StepOutput, StepShape
from paxserve.engine.step_plan import RowResult, ScheduledRow, ScheduledStep
from paxserve.messages import TokenLogprobs


class Launched(NamedTuple):
    """A step on the device whose results have not been read."""

    step: ScheduledStep | DecodeStep
    layout: Layout
    out: StepOutput


class ModelRunner:
    """Owns the weights, the KV pool and the device state of one engine."""

    def __init__(
        self, model: nnx.Module, config: EngineConfig, pages: PagePool, *, max_model_len: int, mesh: Mesh | None = None
    ) -> None:
        """`pages` says how many there are, on the device and in host memory; who holds them is none of its business."""
        self._specs = ProgramSpecs(model, config, num_pages=pages.num_pages, max_model_len=max_model_len, mesh=mesh)
        self.shape = self._specs.shape
        self._weights = jax.tree.leaves(nnx.state(model))
        self._slots = SlotTable(self.shape.num_slots, self.shape.max_pages, self.shape.groups.num_groups)
        self._bias_states: dict[int, tuple[Request, BiasState]] = {}
        has_host = pages.num_host_slots > 0
        self._host_pages = HostPages(pages.num_host_slots, self._specs.moved_pages, pages.disk) if has_host else None
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
        specs = self._specs
        self._pool = jax.jit(specs.make_pool, out_shardings=specs.pool_sharding)()
        self._state, self._rich = jax.tree.map(_zeros, (specs.state, specs.rich))
        jobs: dict[Hashable, Callable[[], Any]] = {layout: specs.step(layout).compile for layout in specs.layouts}
        needed: dict[Hashable, Callable[[], Any]] = {layout: jobs.pop(layout) for layout in specs.essential_layouts()}
        needed |= {name: program.compile for name, program in specs.helpers().items()}
        self._programs = Programs(ProgramCache(cache_folder, *specs.identity, devices=specs.devices), needed, jobs)

    # Sleep

    def sleep(self) -> None:
        """Free the device's memory: weights go to the host, the KV pool is thrown away. Nothing may be launched."""
        self._free_pool()
        if self._weights and next(iter(self._weights[0].devices())).platform != "cpu":  # there it is the host's already
            on_device, self._weights = self._weights, jax.device_get(self._weights)
            for array in on_device:
                array.delete()

    def discard(self) -> None:
        """Free the memory of weights and KV pool, here and there. Nothing may be launched."""
        self._free_pool()
        for array in self._weights:
            array.delete()
        self._weights = []

    def _free_pool(self) -> None:
        self._pool_shardings = jax.tree.map(lambda leaf: leaf.sharding, self._pool)
        self._weight_shardings = [weight.sharding for weight in self._weights]
        for array in jax.tree.leaves(self._pool):
            array.delete()
        self._pool = None

    def wake_up(self, load: Callable[[], nnx.Module]) -> None:
        """Undo `sleep` or `discard`, the latter with what `load` reads; the pool is empty."""
        weights = self._weights or jax.tree.leaves(nnx.state(load()))
        self._weights = jax.device_put(weights, self._weight_shardings)
        self._pool = jax.jit(self._specs.make_pool, out_shardings=self._pool_shardings)()

    # One step

    def launch(self, step: ScheduledStep | DecodeStep) -> Launched:
        """Start a step on the device without waiting for it or for any step before it."""
        is_rich = isinstance(step, ScheduledStep) and needs_rich(step)
        layout: Layout = self._programs.choose(self._layouts(step, is_rich=is_rich))
        if self._host_pages is not None:
            self._move_pages(step, self._host_pages)
        if step.page_copies:
            self._copy_pages(list(step.page_copies))
        indices, values = self._table_changes(step, layout)
        if is_rich:
            self._update_biases(step.rows)
        packed = pack(step, layout, indices, values, self._state.table.shape[0])
        rich = self._rich if is_rich else None
        self._pool, self._state, rich, out = self._programs[layout](
            self._weights, self._pool, self._state, rich, packed
        )
        if rich is not None:
            self._rich = rich
        out.tokens.copy_to_host_async()
        return Launched(step, layout, out)

    def _layouts(self, step: ScheduledStep | DecodeStep, *, is_rich: bool) -> list[Layout]:
        """The programs that can run the step, the smallest first."""
        specs = self._specs
        if isinstance(step, DecodeStep):
            layouts = specs.plain_layouts if step.count == 1 else specs.multi_layouts
            return fitting(layouts, step.num_rows, step.num_rows)
        return fitting(specs.rich_layouts if is_rich else specs.plain_layouts, step.num_tokens, step.num_rows)

    def read(self, launched: Launched) -> list[RowResult] | np.ndarray:
        """Wait for a step and return what it found for each row; of a `DecodeStep` tokens, [K, R]."""
        step, out = launched.step, launched.out
        if isinstance(step, DecodeStep):
            tokens = np.asarray(out.tokens).reshape(-1, launched.layout.num_rows)
            return tokens[: step.count, : step.num_rows]
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

    def _table_changes(self, step: ScheduledStep | DecodeStep, layout: Layout) -> tuple[list[int], list[int]]:
        """Changes small enough to travel with the step; what is more goes ahead of it."""
        indices, values, newcomers = self._slots.changes(step.changed)
        for request in newcomers:
            if request.params.has_penalties:
                self._set_counts(request)
        while len(indices) > layout.num_deltas:
            self._send_changes(indices[:NUM_UPDATES], values[:NUM_UPDATES])
            indices, values = indices[NUM_UPDATES:], values[NUM_UPDATES:]
        return indices, values

    def _send_changes(self, indices: list[int], values: list[int]) -> None:
        padded = np.full((2, NUM_UPDATES), self._state.table.shape[0], np.int32)
        padded[0, : len(indices)] = indices
        padded[1, : len(values)] = values
        self._state = self._programs["update"](self._state, padded[0], padded[1])

    def _move_pages(self, step: ScheduledStep | DecodeStep, host: HostPages) -> None:
        """Save pages into host memory, then bring others back; nothing waits but for what is still on its way out."""
        for start in range(0, len(step.page_saves), NUM_MOVES):
            pages, slots, keys = zip(*step.page_saves[start : start + NUM_MOVES], strict=True)
            padded = np.array([*pages, *[pages[0]] * (NUM_MOVES - len(pages))], np.int32)
            host.put(slots, self._programs["export"](self._pool, padded), keys)
        host.settle()
        for start in range(0, len(step.page_loads), NUM_MOVES):
            slots, pages = zip(*step.page_loads[start : start + NUM_MOVES], strict=True)
            self._import_pages(pages, host.get(slots, NUM_MOVES))
        for start in range(0, len(step.page_fills), NUM_MOVES):
            contents, pages = zip(*step.page_fills[start : start + NUM_MOVES], strict=True)
            self._import_pages(pages, host.unpack(contents, NUM_MOVES))

    def _import_pages(self, pages: Sequence[int], content: PageContent) -> None:
        padded = np.array([*pages, *[self._specs.num_pages] * (NUM_MOVES - len(pages))], np.int32)
        self._pool = self._programs["import"](self._pool, padded, content)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        for start in range(0, len(copies), NUM_COPIES):
            chunk = np.array(copies[start : start + NUM_COPIES], np.int32)
            padded = np.full((2, NUM_COPIES), self._specs.num_pages, np.int32)
            padded[:, : len(chunk)] = chunk.T
            self._pool = self._programs["copy"](self._pool, padded[0], padded[1])

    def _set_counts(self, request: Request) -> None:
        """Tell the device which tokens a request with penalties has seen so far."""
        size = self.shape.vocab_size
        counts = np.bincount(request.output_token_ids, minlength=size).astype(np.int32)
        in_prompt = np.zeros(size, bool)
        in_prompt[request.token_ids[: request.prompt_len]] = True
        self._rich = self._programs["counts"](self._rich, np.int32(request.slot), counts, in_prompt)

    def _update_biases(self, rows: list[ScheduledRow]) -> None:
        """Send the bias row of every biased request whose row has changed since it was last sent."""
        for row in rows:
            request = row.request
            if not (row.samples and request.params.has_bias):
                continue
            state = bias_state(request, row.position)
            if self._bias_states.get(request.slot) == (request, state):
                continue
            self._bias_states[request.slot] = (request, state)
            bias = bias_row(request, state, self.shape.vocab_size)
            self._rich = self._programs["bias"](self._rich, np.int32(request.slot), bias)


def _zeros(spec: jax.ShapeDtypeStruct) -> Array:
    """Zeros on the devices by a transfer: every shape of `jnp.zeros` would be a program to compile."""
    return jax.device_put(np.zeros(spec.shape, spec.dtype), spec.sharding)


def _host(arrays: Any) -> Any:
    return jax.tree.map(np.asarray, arrays)


def _entry(arrays: Any, index: int, token: int, wanted: int, shape: StepShape) -> TokenLogprobs:
    """One position's log-probabilities: the token itself, then the `wanted` most likely ones."""
    chosen, rank, top_ids, top_logprobs = (array[index] for array in arrays)
    count = shape.num_top_logprobs if wanted == -1 else wanted
    return TokenLogprobs([token, *top_ids[:count].tolist()], [float(chosen), *top_logprobs[:count].tolist()], int(rank))
