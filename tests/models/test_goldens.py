"""Every family against transformers: prompts in one forward, then decoding token by token through the pages."""

import numpy as np
import pytest

from tests.models.paged_runner import PagedRunner, golden_data, load_golden, log_softmax

GOLDENS = (
    "arcee",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "ernie4_5",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "llama",
    "llama4_text",
    "llama_mha_bias",
    "llama_mqa",
    "llama_rope3_tied",
    "llama_yarn",
    "mistral_swa",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi3",
    "phi_partial",
    "qwen2",
    "qwen2_moe",
    "qwen2_swa_top",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_nonorm",
    "seed_oss",
    "smollm3_nope",
    "stablelm",
    "starcoder2",
)
TOLERANCE = 1e-4  # of float32 log-probabilities; what was measured is below 3e-5


EXECUTIONS = ("looped", "scanned")


@pytest.mark.parametrize(("name", "execution"), [(name, EXECUTIONS[i % 2]) for i, name in enumerate(GOLDENS)])
def test_golden(name, execution):
    check_golden(name, (0, 1, 2), layer_execution=execution)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "execution"), [(name, EXECUTIONS[1 - i % 2]) for i, name in enumerate(GOLDENS)])
def test_golden_run_the_other_way(name, execution):
    check_golden(name, (0, 1, 2), layer_execution=execution)


def test_ministral_is_mistral_with_a_choice_of_windows():
    check_golden("mistral_swa", (0, 1, 2), model_type="ministral")


@pytest.mark.parametrize(("prompts", "max_model_len"), [((0, 1), 64), ((2,), 256)])
def test_longrope_is_settled_by_the_longest_sequence(prompts, max_model_len):
    check_golden("phi3_longrope", prompts, max_model_len=max_model_len)


def check_golden(name, prompts, **options):
    data = golden_data(name)
    greedy = [data[f"greedy_{i}"] for i in prompts]
    runner = PagedRunner(
        load_golden(name, **options), "reference", num_rows=len(prompts), max_tokens=104, expert_backend="cpu"
    )

    logits = runner.feed([data[f"prompt_{i}"] for i in prompts])
    for i, row in zip(prompts, logits, strict=True):
        np.testing.assert_allclose(log_softmax(row), log_softmax(data[f"logits_{i}"]), rtol=0, atol=TOLERANCE)
    for step in range(12):
        assert [row[-1].argmax() for row in logits] == [ids[step] for ids in greedy]
        logits = runner.feed([ids[step : step + 1] for ids in greedy])


@pytest.mark.parametrize("name", ["llama_mha_bias", "qwen2_swa_top", "smollm3_nope", "qwen3_moe_nonorm", "deepseek_v3"])
def test_layers_may_be_run_in_any_way(name):
    prompts = [golden_data(name)[f"prompt_{i}"] for i in range(3)]
    unrolled, *others = (
        PagedRunner(load_golden(name, layer_execution=execution), "reference", num_rows=3, max_tokens=104).feed(prompts)
        for execution in ("unrolled", "scanned", "looped")
    )
    for other in others:
        for expected, logits in zip(unrolled, other, strict=True):
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
