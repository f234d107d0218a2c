"""Every family against transformers: prompts in one forward, then decoding token by token through the pages."""

import numpy as np
import pytest

from tests.models.paged_runner import PagedRunner, golden_data, load_golden, log_softmax

GOLDENS = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "llama_mha_bias",
    "llama_mqa",
    "llama_rope3_tied",
    "llama_yarn",
    "mistral_swa",
    "qwen2",
    "qwen2_swa_top",
    "qwen3",
    "smollm3_nope",
)
TOLERANCE = 1e-4  # the issue asks for 1e-3; what was measured is below 3e-5


@pytest.mark.parametrize("execution", ["looped", "scanned"])
@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name, execution):
    data = golden_data(name)
    prompts, greedy = ([data[f"{kind}_{i}"] for i in range(3)] for kind in ("prompt", "greedy"))
    runner = PagedRunner(load_golden(name, layer_execution=execution), "reference", num_rows=3, max_tokens=104)

    logits = runner.feed(prompts)
    for i in range(3):
        np.testing.assert_allclose(log_softmax(logits[i]), log_softmax(data[f"logits_{i}"]), rtol=0, atol=TOLERANCE)
    for step in range(12):
        assert [row[-1].argmax() for row in logits] == [ids[step] for ids in greedy]
        logits = runner.feed([ids[step : step + 1] for ids in greedy])


@pytest.mark.parametrize("name", ["llama_mha_bias", "qwen2_swa_top", "smollm3_nope"])
def test_layers_may_be_run_in_any_way(name):
    prompts = [golden_data(name)[f"prompt_{i}"] for i in range(3)]
    unrolled, *others = (
        PagedRunner(load_golden(name, layer_execution=execution), "reference", num_rows=3, max_tokens=104).feed(prompts)
        for execution in ("unrolled", "scanned", "looped")
    )
    for other in others:
        for expected, logits in zip(unrolled, other, strict=True):
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
