"""Every pooling family against transformers: ragged batches of whole prompts, the padding full of other tokens."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.inputs import Batch, WholePrompts
from models.layers.pooling import pool
from paxserve.config import ModelConfig
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.loaders.pooling_spec import resolve_pooling
from paxserve.loaders.weights import choose_architecture, load_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "pooling"
TOLERANCE = 2e-4  # of states and logits that reach 10 and more
NUM_TOKENS = 96
CASES = {
    "bert": "looped",
    "bert_pair": "scanned",
    "roberta": "looped",
    "xlm_roberta": "scanned",
    "modernbert": "looped",
    "modernbert_classes": "scanned",
    "gemma3_both_ways": "looped",
    "qwen3_classes": "scanned",
}


@functools.cache
def golden(name):
    with np.load(GOLDENS / name / "golden.npz") as data:
        return dict(data)


def load(name, execution):
    settings = ModelConfig(model=str(GOLDENS / name))
    checkpoint = open_checkpoint(settings)
    architecture, config = choose_architecture(checkpoint)
    spec = resolve_pooling(checkpoint, architecture, config, settings)
    model = load_model(
        architecture, config, checkpoint, dtype=jnp.float32, layer_execution=execution, num_labels=spec.num_labels
    )
    return model, spec


def run(name, execution):
    """Hidden states of the three prompts, and their logits if the model classifies."""
    data = golden(name)
    model, spec = load(name, execution)
    graphdef, state = nnx.split(model)
    prompts = [data[f"ids_{i}"] for i in range(3)]
    types = [data.get(f"types_{i}", np.zeros(len(ids), np.int32)) for i, ids in enumerate(prompts)]
    ends = np.cumsum([len(ids) for ids in prompts])
    num_padding = NUM_TOKENS - ends[-1]

    def padded(rows, filler):
        return jnp.asarray(np.concatenate([*rows, np.full(num_padding, filler)]), jnp.int32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(state, batch, cu_lens):
        model = nnx.merge(graphdef, state)
        hidden, _ = model(batch, WholePrompts(cu_lens, model.config.is_causal))
        pooled = pool(hidden, cu_lens, spec.pooling)
        return hidden, pooled if model.classifier is None else model.classifier(pooled)

    positions = [np.arange(len(ids)) for ids in prompts]
    batch = Batch(padded(prompts, 3), padded(positions, 0), padded(types, 1))
    hidden, logits = step(state, batch, jnp.asarray([0, *ends, ends[-1]], jnp.int32))
    return np.split(np.asarray(hidden)[: ends[-1]], ends[:-1]), np.asarray(logits)[:3]


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    hidden, logits = run(name, CASES[name])
    data = golden(name)
    for i in range(3):
        if f"hidden_{i}" in data:
            np.testing.assert_allclose(hidden[i], data[f"hidden_{i}"], rtol=1e-4, atol=TOLERANCE)
        else:
            np.testing.assert_allclose(logits[i], data[f"logits_{i}"], rtol=1e-4, atol=TOLERANCE)


def test_pooling_by_hand_with_padding_full_of_nan():
    hidden = jnp.asarray([[1.0], [3.0], [5.0], [8.0], [jnp.nan]])
    cu_lens = jnp.asarray([0, 3, 4, 4], jnp.int32)
    assert pool(hidden, cu_lens, "cls")[:2, 0].tolist() == [1, 8]
    assert pool(hidden, cu_lens, "last")[:2, 0].tolist() == [5, 8]
    assert pool(hidden, cu_lens, "mean")[:, 0].tolist() == [3, 8, 0]
