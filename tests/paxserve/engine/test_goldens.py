"""The engine against transformers: whole prompts and chunks, alone and together, with and without preemption."""

import itertools

import pytest

from paxserve.errors import ConfigError
from tests.engine_driver import GOLDENS as GOLDENS_FOLDER
from tests.engine_driver import golden_data, log_softmax, make_core, request, run

GOLDENS = (
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
IN_CHUNKS = ("deepseek_v3", "llama4_text", "qwen3_moe_nonorm")
PAGE_SIZES = (1, 4, 16)
BUDGETS = (8, 32, 256)
TOLERANCE = 1e-3


def check_golden(core, name: str, *, together: bool, prompts: tuple[int, ...] = (0, 1, 2)) -> None:
    data = golden_data(name)
    ids = {i: data[f"prompt_{i}"] for i in prompts}
    results = run(core, [request(str(i), prompt) for i, prompt in ids.items()], together=together)
    for i in prompts:
        assert results[str(i), 0].token_ids == data[f"greedy_{i}"].tolist()
    scored = run(
        core,
        [request(str(i), prompt, prompt_logprobs=-1, logprobs=0) for i, prompt in ids.items()],
        together=together,
    )
    for i, prompt in ids.items():
        result = scored[str(i), 0]
        assert result.token_ids == data[f"greedy_{i}"].tolist()
        expected = log_softmax(data[f"logits_{i}"])
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(prompt)
        assert result.prompt_logprobs[0] is None
        for position, entry in enumerate(result.prompt_logprobs[1:]):
            row = expected[position]
            chosen, *others = zip(entry.token_ids, entry.logprobs, strict=True)
            assert chosen[0] == prompt[position + 1]
            assert len(others) == row.size
            for token, logprob in (chosen, *others):
                assert abs(logprob - row[token]) < TOLERANCE
        first = result.logprobs[0]
        assert abs(first.logprobs[0] - expected[-1, first.token_ids[0]]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "page_size", "budget"),
    [(name, PAGE_SIZES[i % 3], BUDGETS[(i + i // 3) % 3]) for i, name in enumerate(GOLDENS)],
)
def test_golden(name, page_size, budget):
    core = make_core(name, block_size=page_size, max_num_batched_tokens=budget)
    check_golden(core, name, together=True)
    check_golden(core, name, together=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "page_size", "budget"), [*itertools.product(GOLDENS, PAGE_SIZES, BUDGETS)])
@pytest.mark.parametrize("caching", [True, False])
def test_golden_matrix(name, page_size, budget, caching):
    core = make_core(name, block_size=page_size, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    check_golden(core, name, together=True)
    check_golden(core, name, together=False)


@pytest.mark.parametrize(("name", "num_pages"), [("llama", 30), ("mistral_swa", 18)])
@pytest.mark.parametrize("caching", [True, False])
def test_golden_with_preemption(name, num_pages, caching):
    data = golden_data(name)
    core = make_core(name, num_gpu_blocks_override=num_pages, block_size=4, enable_prefix_caching=caching)
    prompts = [data[f"prompt_{i}"] for i in (1, 1, 1, 2)]
    results = run(core, [request(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert core.stats().num_preemptions > 0
    for i, source in enumerate((1, 1, 1, 2)):
        assert results[str(i), 0].token_ids == data[f"greedy_{source}"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8, 256])
@pytest.mark.parametrize(("max_model_len", "prompts"), [(64, (0, 1)), (128, (2,))])
def test_longrope_decides_once_by_the_longest_sequence(max_model_len, prompts, budget):
    core = make_core("phi3_longrope", max_model_len=max_model_len, max_num_batched_tokens=budget)
    check_golden(core, "phi3_longrope", prompts=prompts, together=True)
    check_golden(core, "phi3_longrope", prompts=prompts, together=False)


def check_in_chunks(name: str) -> None:
    """In chunks of 8 tokens, together, with prefix caching."""
    core = make_core(name, max_num_batched_tokens=8, compile_sizes=[8])
    check_golden(core, name, together=True)


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_golden_in_chunks(name):
    check_in_chunks(name)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8, 256])
@pytest.mark.parametrize(
    "name", sorted({p.parent.name for p in GOLDENS_FOLDER.glob("*/golden.npz")} - {*GOLDENS, "phi3_longrope"})
)
def test_golden_of_every_other_family(name, budget):
    core = make_core(name, max_num_batched_tokens=budget)
    check_golden(core, name, together=True)
    check_golden(core, name, together=False)


def test_pages_that_chunks_cannot_be_made_of_are_refused():
    with pytest.raises(ConfigError, match="block_size=24 is not supported: this model attends in chunks of 32 tokens"):
        make_core("llama4_text", block_size=24)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_golden_on_the_interpreted_tpu_kernels(name):
    core = make_core(name, attention_backend="interpret", block_size=16, compile_sizes=[8])
    check_golden(core, name, together=True)
