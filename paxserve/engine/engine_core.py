"""The engine core: loads and compiles a model, then turns requests into tokens, one step a call.

Steps form a pipeline of depth one: a step is launched before the tokens of the step before it are read.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from paxserve.config import EngineConfig
from paxserve.engine.attention_choice import settle_attention
from paxserve.engine.beam_group import first_beam
from paxserve.engine.model_runner import Launched, ModelRunner
from paxserve.engine.page_budget import make_page_pool
from paxserve.engine.request import expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.start import CompilationCounter, PhaseClock, Profiling, checkpoint_dtype, settle_max_model_len
from paxserve.errors import RequestError
from paxserve.loaders.checkpoint import Checkpoint, open_checkpoint
from paxserve.loaders.weights import choose_architecture, load_model
from paxserve.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo, StepOutputs
from paxserve.platform import configure_jax, detect_platform, device_mesh, resolve
from sharding.rules import weight_sharding

logger = logging.getLogger(__name__)

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                       "frequency_penalty", "max_new_tokens")  # fmt: skip


IDLE_SECONDS = 0.05
"""How long a step waits for pages from disk at most, if it has nothing else to do."""


class EngineCore(Profiling):
    """One model on one device or several, its scheduler and its pipeline of launched steps."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None) -> None:
        """`checkpoint` is the configuration's, if it is open already."""
        clock = PhaseClock()
        cache_folder = configure_jax(config.compile)
        platform = detect_platform()
        is_backend_open = config.compile.attention_backend == "auto"
        config = resolve(config, platform)
        mesh = device_mesh(config.parallel, platform)
        checkpoint = checkpoint or open_checkpoint(config.model)
        architecture, model_config = choose_architecture(checkpoint)
        dtype = platform.dtype(config.model.dtype, checkpoint_dtype(checkpoint.hf_config))
        max_model_len = settle_max_model_len(config.model.max_model_len, model_config.max_position_embeddings)
        clock.end("open")
        # Kept, as an engine that has thrown its weights away reads them again.
        self._load = partial(
            load_model, architecture, model_config, checkpoint, dtype=jnp.dtype(dtype),
            layer_execution=config.compile.layer_execution, max_model_len=max_model_len,
            is_dummy=config.model.load_format == "dummy", seed=config.model.seed,
            tensor_shards=config.parallel.tensor_parallel_size, sharding=mesh and partial(weight_sharding, mesh),
        )  # fmt: skip
        model: Any = self._load()  # an nnx module with what every family's `Model` has
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
        config = settle_attention(config, model, max_model_len, was_auto=is_backend_open)
        clock.end("load")
        pool = make_page_pool(config, platform, checkpoint, model.cache_spec, max_model_len)
        self.runner = ModelRunner(model, config, pool, max_model_len=max_model_len, mesh=mesh)
        self.runner.compile(cache_folder)
        clock.end("compile")
        max_num_seqs, budget = config.scheduler.limits
        self.scheduler = Scheduler.for_config(config.scheduler, pool, max_model_len)
        self.config = config
        self.model_info = ModelInfo(
            max_model_len=max_model_len,
            max_sequence_tokens=self.scheduler.max_sequence_tokens,
            vocab_size=self.runner.shape.vocab_size,
            num_pages=pool.num_pages,
            page_size=config.cache.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            eos_token_ids=_eos_token_ids(checkpoint.hf_config, checkpoint.generation_config),
            generation_config={
                k: v for k, v in checkpoint.generation_config.items() if k in GENERATION_DEFAULTS and v is not None
            },
            dtype=dtype,
            num_programs=self.runner.num_programs,
            startup_seconds=clock.seconds,
        )
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._launched: deque[Launched] = deque()
        self._seeds = np.random.default_rng(config.model.seed)
        self._num_arrivals = 0
        self._padding_tokens = 0
        self._is_asleep = False
        self._aborted: list[EngineOutput] = []
        self._seconds: dict[str, float] = dict.fromkeys(("schedule", "launch", "wait", "process"), 0.0)
        self._compilations = CompilationCounter()
        logger.info(
            "Ready: %d pages of %d tokens, %s", pool.num_pages, config.cache.block_size,
            ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.seconds.items()),
        )  # fmt: skip

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never run."""
        if request.pooling is not None:
            raise RequestError("This model generates text. For vectors or scores run it with runner='pooling'.")
        length, limit = len(request.prompt_token_ids), self.model_info.max_sequence_tokens
        if length == 0 or length > limit:
            raise RequestError(f"The prompt must have 1 to {limit} tokens, got {length}.", "input_tokens")
        if request.priority != 0 and self.config.scheduler.scheduling_policy != "priority":
            raise RequestError(
                f"priority={request.priority} needs a server with --scheduling-policy priority: "
                "this one serves requests in order of arrival.",
                "priority",
            )
        n, seed = request.params.n, request.params.seed
        if seed is None:
            seeds = [int(word) for word in self._seeds.integers(0, 2**63, n)]
        else:
            seeds = [seed + index for index in range(n)]
        deadline = None if request.timeout is None else request.arrival_time + request.timeout
        if request.beam_search is None:
            choices = expand_choices(request, seeds, self._num_arrivals)
        else:
            self._check_beams(request.beam_search.beam_width)
            choices = [first_beam(request, self._num_arrivals, limit)]
        self.scheduler.add(choices, deadline)
        self._num_arrivals += 1

    def _check_beams(self, width: int) -> None:
        most = self.model_info.max_num_seqs
        if width > most:
            raise RequestError(f"beam_width must be at most max_num_seqs={most}, got {width}.", "beam_width")

    def abort_requests(self, targets: Iterable[tuple[str, int | None]]) -> None:
        """End requests, or single choices of them, whoever still waits for their output hears "abort"."""
        for request_id, index in targets:
            for ended in self.scheduler.abort(request_id, index):
                self._aborted.append(
                    EngineOutput(request_id=request_id, index=ended, new_token_ids=[], finish_reason="abort")
                )

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a request that waits or runs another priority; unknown ones are ignored."""
        self.scheduler.set_priority(request_id, priority)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to do or to tell."""
        return bool(self._launched or self._aborted) or self.scheduler.has_unfinished()

    def step(self) -> StepOutputs:
        """Launch the next step, then wait for the one before it and return what it brought."""
        outputs, self._aborted = StepOutputs([*self._aborted, *self.scheduler.expire(time.time())]), []
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        planned = time.perf_counter()
        if scheduled is not None:
            with self._compilations:
                launch = self.runner.launch(scheduled)
            self._launched.append(launch)
            self._padding_tokens += launch.layout.num_tokens * scheduled.count - scheduled.num_tokens
        elif not self._launched and self.scheduler.pool.disk is not None:
            self.scheduler.pool.disk.wait(IDLE_SECONDS)
        launched = time.perf_counter()
        self._add_seconds(schedule=planned - started, launch=launched - planned)
        if self._launched and (scheduled is None or len(self._launched) >= self._depth):
            oldest = self._launched.popleft()
            results = self.runner.read(oldest)
            ready = time.perf_counter()
            outputs.add(self.scheduler.update(oldest.step, results))
            self._add_seconds(wait=ready - launched, process=time.perf_counter() - ready)
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests run."""
        return self.scheduler.reset_prefix_cache()

    def sleep(self) -> bool:
        """Free the device's memory until `wake_up`; False, and nothing done, while requests run or while asleep."""
        return self._fall_asleep(self.runner.sleep, keeps_disk=True)

    def discard(self) -> bool:
        """The same, and throw the weights away: `wake_up` reads them from the checkpoint."""
        return self._fall_asleep(self.runner.discard, keeps_disk=False)

    def _fall_asleep(self, free_memory: Callable[[], None], *, keeps_disk: bool) -> bool:
        if self._is_asleep or self.scheduler.has_unfinished():
            return False
        while self._launched:  # what was aborted in mid-step
            self._aborted = list(self.step())
        self.scheduler.reset_prefix_cache(keeps_disk=keeps_disk)
        free_memory()
        self._is_asleep = True
        return True

    def wake_up(self) -> bool:
        """Fill the device's memory again; False if it was not asleep."""
        if not self._is_asleep:
            return False
        self.runner.wake_up(self._load)
        self._is_asleep = False
        return True

    def stats(self) -> EngineStats:
        """Counters since start and gauges now."""
        stats = self.scheduler.stats()
        stats.num_programs = self.runner.num_programs
        stats.padding_tokens = self._padding_tokens
        stats.recompilations = self._compilations.count
        stats.step_seconds = dict(self._seconds)
        return stats

    def check_integrity(self) -> None:
        """Assert the host's invariants; for tests."""
        self.scheduler.check_integrity()

    def _add_seconds(self, **phases: float) -> None:
        for name, seconds in phases.items():
            self._seconds[name] += seconds


def _eos_token_ids(*configs: dict[str, Any]) -> list[int]:
    """All end-of-sequence ids that the checkpoint names, in order, without repeats."""
    found: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return list(dict.fromkeys(found))
