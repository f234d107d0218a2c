"""Runs a model on several sequences through a paged cache, as the engine does but without the engine."""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models import find_architecture
from models.inputs import Batch, PagedKVCache
from pallas_kernels.ragged_paged_attention import AttentionMetadata, kv_head_axis, make_pool
from paxserve.config import ModelConfig
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.loaders.weights import load_model
from sharding.rules import pool_sharding, replicated

GOLDENS = Path(__file__).parents[1] / "goldens"
PAGE_SIZE = 4


@functools.cache
def golden_data(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / name / "golden.npz") as data:
        return dict(data)


def load_golden(name: str, *, model_type: str | None = None, **options) -> nnx.Module:
    checkpoint = open_checkpoint(ModelConfig(model=str(GOLDENS / name)))
    architecture = find_architecture({"model_type": model_type or checkpoint.hf_config["model_type"]})
    config = architecture.Config.from_hf(checkpoint.hf_config)
    return load_model(architecture, config, checkpoint, dtype=jnp.float32, **options)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


class PagedRunner:
    """Sequences that share one pool; each `feed` gives every one of them more tokens."""

    def __init__(
        self,
        model: nnx.Module,
        backend: str,
        *,
        num_rows: int,
        max_tokens: int,
        batch_tokens: int = 144,
        expert_backend: str = "reference",
        mesh: Mesh | None = None,
    ) -> None:
        self.batch_tokens = batch_tokens
        graphdef, self.state = nnx.split(model)
        spec = model.cache_spec
        width = -(-max_tokens // PAGE_SIZE)
        self.pool = make_pool(
            backend,
            num_layers=spec.num_layers,
            num_pages=num_rows * width,
            page_size=PAGE_SIZE,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            is_latent=spec.is_latent,
            dtype=jnp.float32,
        )
        if mesh is not None:
            is_split = not spec.is_latent
            self.pool = jax.device_put(
                self.pool, pool_sharding(mesh, kv_head_axis(backend)) if is_split else replicated(mesh)
            )
        # Pages of different rows alternate, backwards, so that no row owns a contiguous stretch.
        self.page_table = np.arange(num_rows * width, dtype=np.int32)[::-1].reshape(width, num_rows).T
        self.lengths = np.zeros(num_rows, np.int32)

        # Compiling takes nearly all of the tests' time, and less without optimisation.
        @functools.partial(jax.jit, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
        def step(state, pool, batch, metadata):
            model = nnx.merge(graphdef, state)
            cache = PagedKVCache(pool, metadata, backend, expert_backend, PAGE_SIZE, mesh)
            hidden, cache = model(batch, cache)
            return model.logits(hidden)[:, : model.config.vocab_size], cache.pool

        self._step = step

    def feed(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Float32 logits [T, V] of each row's new tokens.

        An empty row and padding tokens are added, so that every call is the same program (compiling takes longest).
        """
        counts = np.array([len(ids) for ids in rows], np.int32)
        starts, self.lengths = self.lengths, self.lengths + counts
        positions = [start + np.arange(count) for start, count in zip(starts, counts, strict=True)]
        ends = np.cumsum(counts)
        metadata = AttentionMetadata(
            cu_q_lens=jnp.asarray([0, *ends, ends[-1]], jnp.int32),
            kv_lens=jnp.asarray([*self.lengths, 0], jnp.int32),
            page_table=jnp.asarray(np.concatenate([self.page_table, self.page_table[:1]])),
            num_decode_rows=jnp.int32(len(rows) if (counts == 1).all() else 0),
        )
        padding = self.batch_tokens - ends[-1]
        batch = Batch(
            jnp.asarray(np.concatenate([*rows, np.full(padding, 1)]), jnp.int32),
            jnp.asarray(np.concatenate([*positions, np.zeros(padding)]), jnp.int32),
        )
        logits, self.pool = self._step(self.state, self.pool, batch, metadata)
        return np.split(np.asarray(logits)[: ends[-1]], ends[:-1])
