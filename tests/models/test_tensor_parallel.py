"""Families spread over simulated devices: sizes that divide, copies of kv heads, padded heads and vocabularies."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from sharding.mesh import make_mesh
from sharding.rules import weight_sharding
from tests.models.paged_runner import GOLDENS, PagedRunner, golden_data, load_golden, log_softmax

TOLERANCE = 1e-4  # as on one device
EXECUTIONS = ("looped", "scanned", "unrolled")
OPTIONS: dict[str, dict[str, Any]] = {"phi3_longrope": {"max_model_len": 64}}


def check_golden(name: str, tensor: int, execution: str) -> None:
    data = golden_data(name)
    mesh = make_mesh(jax.devices(), tensor=tensor)
    model = load_golden(
        name, layer_execution=execution, tensor_shards=tensor, sharding=partial(weight_sharding, mesh),
        **OPTIONS.get(name, {}),
    )  # fmt: skip
    runner = PagedRunner(model, "reference", num_rows=2, max_tokens=104, mesh=mesh)
    logits = runner.feed([data[f"prompt_{i}"] for i in (0, 1)])
    for i, row in enumerate(logits):
        np.testing.assert_allclose(log_softmax(row), log_softmax(data[f"logits_{i}"]), rtol=0, atol=TOLERANCE)
    for step in range(3):
        ids = [data[f"greedy_{i}"][step] for i in (0, 1)]
        assert [row[-1].argmax() for row in logits] == ids
        logits = runner.feed([np.array([token]) for token in ids])


# Norms of each head, over all heads together, learned positions, one kv head, q, k and v fused, sinks, experts; 320
# tokens and 112 columns do not divide by 3, nor do any heads.
@pytest.mark.parametrize(
    ("name", "tensor", "execution"),
    [
        ("gemma3_text", 2, "scanned"),
        ("falcon", 2, "looped"),
        ("gpt2", 2, "unrolled"),
        ("cohere", 4, "looped"),
        ("olmo2", 4, "scanned"),
        ("stablelm", 3, "looped"),
        ("phi3", 3, "scanned"),
        ("gpt_oss", 2, "scanned"),
        ("qwen3_moe", 2, "looped"),
        ("deepseek_v3", 2, "scanned"),
        ("deepseek_v2", 3, "looped"),
    ],
)
def test_golden(name, tensor, execution):
    check_golden(name, tensor, execution)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 3, 8])
@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz")))
def test_every_golden(name, tensor):
    check_golden(name, tensor, EXECUTIONS[(len(name) + tensor) % 3])
