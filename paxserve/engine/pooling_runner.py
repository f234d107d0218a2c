"""The device side of a pooling model: compiles every program up front, launches steps, reads their results."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxserve.config import EngineConfig
from paxserve.engine.compiler_options import compile_lowered
from paxserve.engine.pooling_step import PooledModel, PoolingLayout, make_pooling_step, pack_prompts
from paxserve.engine.program_cache import ProgramCache
from paxserve.engine.programs import Programs
from paxserve.errors import ConfigError
from paxserve.messages import EngineRequest

SMALLEST = 16
"""Tokens of the smallest program."""


class LaunchedBatch(NamedTuple):
    """A step on the device whose results have not been read."""

    requests: list[EngineRequest]
    pooled: jax.Array
    hidden: jax.Array


class PoolingRunner:
    """Owns the weights of one pooling engine; there is no state from step to step."""

    def __init__(self, model: PooledModel, config: EngineConfig, *, max_model_len: int) -> None:
        self.max_rows, usual = config.scheduler.limits
        # A prompt is computed whole, so that there must be a program for the longest.
        self.budget = max(usual, max_model_len)
        graphdef, params = nnx.split(model)
        self._weights, treedef = jax.tree.flatten(params)
        self._make_step = partial(make_pooling_step, graphdef, treedef)
        backbone: Any = model.backbone
        self._identity = (
            type(backbone), backbone.config, max_model_len, config.compile.layer_execution,
            model.pooling, model.score_ids, model.expert_backend, [p.act for p in model.projections],
        )  # fmt: skip
        sizes = sorted({*config.compile.compile_sizes, self.budget}) or []
        if not config.compile.compile_sizes:
            sizes = _ladder(self.budget)
        elif not 1 <= sizes[0] <= sizes[-1] <= self.budget:
            raise ConfigError(f"compile_sizes must be between 1 and {self.budget} for this model, got {sizes}.")
        self._layouts = [PoolingLayout(size, min(size, self.max_rows)) for size in sizes]
        self._needed = {sizes[0], self.budget, min(size for size in sizes if size >= min(usual, self.budget))}
        self._programs: Programs

    @property
    def num_programs(self) -> int:
        """Programs compiled by now."""
        return len(self._programs)

    def wait_for_programs(self) -> None:
        """Return once the programs that are compiled in the background are there too."""
        self._programs.wait()

    def compile(self, cache_folder: Path | None) -> None:
        """Compile the programs, or load them: the smallest, the usual and the largest now, others in the background."""
        weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._weights)
        arrays = [(leaf.shape, str(leaf.dtype)) for leaf in weights]
        cache = ProgramCache(cache_folder, *self._identity, arrays)
        jobs: dict[Hashable, Callable[[], Any]] = {
            layout: partial(self._compile_step, layout, weights) for layout in self._layouts
        }
        first = [layout for layout in self._layouts if layout.num_tokens in self._needed]
        needed: dict[Hashable, Callable[[], Any]] = {layout: jobs.pop(layout) for layout in first}
        self._programs = Programs(cache, needed, jobs)

    def _compile_step(self, layout: PoolingLayout, weights: Any) -> Any:
        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        return compile_lowered(jax.jit(self._make_step(layout)).lower(weights, packed), jax.devices()[0].device_kind)

    def launch(self, requests: list[EngineRequest]) -> LaunchedBatch:
        """Start a step on the device without waiting for it."""
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        fitting = [x for x in self._layouts if x.num_tokens >= num_tokens and x.num_rows >= len(requests)]
        layout: PoolingLayout = self._programs.choose(fitting)
        pooled, hidden = self._programs[layout](self._weights, pack_prompts(requests, layout))
        pooled.copy_to_host_async()
        return LaunchedBatch(requests, pooled, hidden)

    def read(self, launched: LaunchedBatch) -> list[np.ndarray]:
        """The float32 vector of each request; a matrix, a row a token, for those that asked for one."""
        pooled = np.asarray(launched.pooled)
        hidden: np.ndarray | None = None
        results: list[np.ndarray] = []
        end = 0
        for row, request in enumerate(launched.requests):
            start, end = end, end + len(request.prompt_token_ids)
            if request.pooling is not None and request.pooling.task == "token_embed":
                hidden = np.asarray(launched.hidden) if hidden is None else hidden
                results.append(hidden[start:end])
            else:
                results.append(pooled[row])
        return results


def _ladder(budget: int) -> Sequence[int]:
    """Powers of two and the sizes half way between them, so that at most a third of a step is padding."""
    sizes, size = {budget}, SMALLEST
    while size < budget:
        sizes |= {size, min(size + size // 2, budget)}
        size *= 2
    return sorted(sizes)
