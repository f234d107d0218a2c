"""The engine core of pooling models: whole prompts, first come first served, packed into steps, none of them cached."""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.initializer import Initializer
from models.layers.pooling import Projection
from models.layers.weight_map import stored, transposed
from paxserve.config import EngineConfig
from paxserve.engine.pooling_runner import LaunchedBatch, PoolingRunner
from paxserve.engine.pooling_step import PooledModel
from paxserve.engine.start import CompilationCounter, PhaseClock, Profiling, checkpoint_dtype, settle_max_model_len
from paxserve.errors import ConfigError, RequestError
from paxserve.loaders.checkpoint import Checkpoint
from paxserve.loaders.hf_folder import HfFolder
from paxserve.loaders.pooling_spec import Activation, PoolingSpec
from paxserve.loaders.sentence_transformers_config import DenseModule
from paxserve.loaders.weights import choose_architecture, load_model, load_weights
from paxserve.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo, PoolingInfo
from paxserve.platform import configure_jax, detect_platform, resolve
from paxserve.pooling_params import PoolingParams

logger = logging.getLogger(__name__)

DEPTH = 2
"""Steps on the device at once: the next is launched before the results of the one before are read."""

DENSE_LOAD_MAP = {"linear.weight": transposed("linear.weight"), "linear.bias": stored("linear.bias")}


class PoolingCore(Profiling):
    """One pooling model on one device; the same methods as `EngineCore`."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, spec: PoolingSpec) -> None:
        clock = PhaseClock()
        cache_folder = configure_jax(config.compile)
        platform = detect_platform()
        config = resolve(config, platform)
        if config.parallel.tensor_parallel_size != 1:
            raise ConfigError("tensor_parallel_size is not supported for pooling models yet: only 1 is.")
        architecture, model_config = choose_architecture(checkpoint)
        dtype = platform.dtype(config.model.dtype, checkpoint_dtype(checkpoint.hf_config))
        trained = model_config.max_position_embeddings
        # What sentence-transformers cuts texts to is a habit, not a limit of the model: a longer one may be asked for.
        usual = min(trained, spec.max_tokens or trained)
        max_model_len = settle_max_model_len(config.model.max_model_len or usual, trained)
        clock.end("open")
        model: Any = load_model(
            architecture, model_config, checkpoint, dtype=jnp.dtype(dtype),
            layer_execution=config.compile.layer_execution, max_model_len=max_model_len,
            is_dummy=config.model.load_format == "dummy", seed=config.model.seed,
            num_labels=None if spec.score_tokens else spec.num_labels,
        )  # fmt: skip
        cached = getattr(model, "cache_spec", None)
        if getattr(cached, "page_divides", None) or getattr(cached, "is_latent", False):
            raise ConfigError(
                f"{checkpoint.name}: a model with attention in chunks or latents cannot be run for vectors."
            )
        projections = [load_projection(module) for module in spec.dense]
        experts = config.compile.expert_backend
        pooled = PooledModel(model, projections, spec.pooling, _score_ids(checkpoint, spec), experts)
        clock.end("load")
        self.config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
        self.spec = spec
        self.runner = PoolingRunner(pooled, config, max_model_len=max_model_len)
        self.runner.compile(cache_folder)
        clock.end("compile")
        self.model_info = ModelInfo(
            max_model_len=max_model_len,
            max_sequence_tokens=max_model_len,
            vocab_size=model_config.vocab_size,
            num_pages=0,
            page_size=config.cache.block_size,
            max_num_seqs=self.runner.max_rows,
            max_num_batched_tokens=self.runner.budget,
            eos_token_ids=[],
            generation_config={},
            dtype=dtype,
            num_programs=self.runner.num_programs,
            startup_seconds=clock.seconds,
            pooling=pooling_info(spec, model_config.hidden_size),
        )
        self._waiting: deque[EngineRequest] = deque()
        self._launched: deque[LaunchedBatch] = deque()
        self._dropped: set[str] = set()
        self._aborted: list[EngineOutput] = []
        self._stats = EngineStats()
        self._compilations = CompilationCounter()
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.seconds.items())
        logger.info("Ready to %s, %s pooling, %s", spec.task, spec.pooling, phases)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never run."""
        if request.pooling is None:
            raise RequestError("This model gives vectors or scores: it does not generate text.", code=404)
        length, limit = len(request.prompt_token_ids), self.model_info.max_model_len
        if not 1 <= length <= limit:
            raise RequestError(f"The prompt must have 1 to {limit} tokens, got {length}.", "input_tokens")
        self._waiting.append(request)

    def abort_requests(self, targets: Iterable[tuple[str, int | None]]) -> None:
        """End requests; whoever still waits for them hears "abort"."""
        wanted = {request_id for request_id, _ in targets}
        gone = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        for batch in self._launched:
            running = [r for r in batch.requests if r.request_id in wanted and r.request_id not in self._dropped]
            self._dropped.update(r.request_id for r in running)
            gone += running
        self._aborted += [
            EngineOutput(request_id=request.request_id, new_token_ids=[], finish_reason="abort") for request in gone
        ]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to do or to tell."""
        return bool(self._waiting or self._launched or self._aborted)

    def step(self) -> list[EngineOutput]:
        """Launch the next step, then wait for the one before it and return what it brought."""
        outputs, self._aborted = self._aborted, []
        batch = self._take_batch()
        if batch:
            with self._compilations:
                self._launched.append(self.runner.launch(batch))
        if self._launched and (not batch or len(self._launched) >= DEPTH):
            outputs += self._finish(self._launched.popleft())
        return outputs

    def reset_prefix_cache(self) -> bool:
        """There is none, so that nothing is left of it."""
        return True

    def sleep(self) -> bool:
        """False: a pooling engine holds nothing on the device but its weights, and keeps them."""
        return False

    def discard(self) -> bool:
        """False: nor does it give its weights away."""
        return False

    def wake_up(self) -> bool:
        """False: it never sleeps."""
        return False

    def stats(self) -> EngineStats:
        """Counters since start and gauges now."""
        stats = self._stats
        stats.num_waiting = len(self._waiting)
        stats.num_running = sum(len(batch.requests) for batch in self._launched)
        stats.num_programs = self.runner.num_programs
        stats.recompilations = self._compilations.count
        return stats

    def check_integrity(self) -> None:
        """Assert that nobody waits twice, or waits and runs; for tests."""
        ids = [r.request_id for r in self._waiting] + [r.request_id for b in self._launched for r in b.requests]
        assert len(ids) == len(set(ids))
        assert self._dropped <= set(ids)

    def _take_batch(self) -> list[EngineRequest]:
        """The next requests in order of arrival, as many as one step holds."""
        batch: list[EngineRequest] = []
        room = self.runner.budget
        while self._waiting and len(batch) < self.runner.max_rows:
            room -= len(self._waiting[0].prompt_token_ids)
            if room < 0:
                break
            batch.append(self._waiting.popleft())
        if batch:
            self._stats.num_steps += 1
            self._stats.last_step_tokens = sum(len(request.prompt_token_ids) for request in batch)
            self._stats.prompt_tokens += self._stats.last_step_tokens
        return batch

    def _finish(self, batch: LaunchedBatch) -> list[EngineOutput]:
        now = time.time()
        outputs = []
        for request, values in zip(batch.requests, self.runner.read(batch), strict=True):
            if request.request_id in self._dropped:
                self._dropped.discard(request.request_id)
                continue
            assert request.pooling is not None
            values = activate(values, request.pooling, self.spec)
            outputs.append(
                EngineOutput(
                    request_id=request.request_id, new_token_ids=[], finish_reason="stop", first_scheduled_time=now,
                    pooled=np.ascontiguousarray(values, np.float32).tobytes(),
                )
            )  # fmt: skip
        return outputs


def activate(values: np.ndarray, params: PoolingParams, spec: PoolingSpec) -> np.ndarray:
    """The vector cut to the wanted length and normalised, or the logits as probabilities."""
    if params.dimensions is not None:
        values = values[..., : params.dimensions]
    is_wanted = spec.use_activation if params.use_activation is None else params.use_activation
    activation: Activation = spec.activation if is_wanted else "none"
    if activation == "normalize":
        return values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)
    if activation == "sigmoid":
        return np.where(values >= 0, 1.0, np.exp(-np.abs(values))) / (1.0 + np.exp(-np.abs(values)))
    if activation == "softmax":
        weights = np.exp(values - values.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)
    return values


def load_projection(module: DenseModule) -> Projection:
    """A Dense module with its weights, in float32."""

    def build() -> Projection:
        init = Initializer(jnp.float32, nnx.Rngs(0))
        return Projection(init, module.in_size, module.out_size, act=module.act, bias=module.bias)

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    return nnx.merge(graphdef, load_weights(abstract, DENSE_LOAD_MAP, HfFolder(module.path)))


def pooling_info(spec: PoolingSpec, hidden_size: int) -> PoolingInfo:
    """What the front is told."""
    size = spec.num_labels or (spec.dense[-1].out_size if spec.dense else hidden_size)
    return PoolingInfo(
        task=spec.task,
        size=size,
        is_matryoshka=spec.is_matryoshka,
        matryoshka_dimensions=list(spec.matryoshka_dimensions),
        labels=list(spec.labels),
        lower_case=spec.lower_case,
        prompts=dict(spec.prompts),
        default_prompt=spec.default_prompt,
        scores_by_tokens=spec.score_tokens is not None,
    )


def _score_ids(checkpoint: Checkpoint, spec: PoolingSpec) -> tuple[int, ...]:
    if spec.score_tokens is None:
        return ()
    ids: list[Any] = checkpoint.load_tokenizer().convert_tokens_to_ids(spec.score_tokens)
    missing = [token for token, token_id in zip(spec.score_tokens, ids, strict=True) if token_id is None]
    if missing:
        raise ConfigError(f"classifier_from_token: the tokenizer has no token {missing[0]!r}.")
    return tuple(ids)
