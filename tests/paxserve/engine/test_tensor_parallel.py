"""The engine on simulated devices: the tokens and log-probabilities of one, few collectives, programs kept by mesh."""

import json
import logging
import re
from collections import Counter

import jax
import pytest
from flax import nnx

from models import find_architecture
from models.inputs import CacheSpec
from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from paxserve.engine.page_budget import count_pages
from paxserve.engine.program_specs import ProgramSpecs
from paxserve.errors import ConfigError
from sharding.mesh import make_mesh
from tests.engine_driver import GOLDENS, golden_data, make_core, request, run
from tests.paxserve.engine.test_goldens import TOLERANCE, check_golden

NAMES = ("llama", "llama_mqa", "llama_mha_bias", "qwen3")
EXECUTIONS = ("looped", "scanned", "unrolled")
SIZES = {"max_num_batched_tokens": 8, "compile_sizes": [8]}


def spread_core(name: str, tensor: int, **flags) -> EngineCore:
    return make_core(name, tensor_parallel_size=tensor, **{**SIZES, **flags})


@pytest.mark.parametrize(("name", "tensor", "execution"), [("llama", 3, "looped"), ("llama_mqa", 8, "scanned")])
def test_golden(name, tensor, execution):
    check_golden(spread_core(name, tensor, layer_execution=execution), name, together=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_golden_at_every_size(name, tensor):
    execution = EXECUTIONS[(NAMES.index(name) + tensor.bit_length()) % 3]
    check_golden(spread_core(name, tensor, layer_execution=execution), name, together=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("llama", "reference"), ("llama", "interpret"), ("qwen3", "interpret")])
def test_golden_on_every_attention_backend(name, backend):
    check_golden(spread_core(name, 2, attention_backend=backend), name, together=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "backend"),
    [
        ("deepseek_v2", 2, "auto"),
        ("deepseek_v2", 4, "ragged"),
        ("deepseek_v3", 2, "ragged"),
        ("deepseek_v3", 4, "auto"),
        ("mixtral", 2, "interpret"),
        ("qwen3_moe", 4, "interpret"),
        ("gpt_oss", 4, "interpret"),
    ],
)
def test_golden_of_experts_and_latents(name, tensor, backend):
    check_golden(spread_core(name, tensor, expert_backend=backend), name, together=True)


@pytest.mark.parametrize("tensor", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sampled_tokens_are_those_of_one_device(tensor):
    """Every row has its own parameters; the rows divide among two devices, not among three."""
    params = [
        {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
    ]  # fmt: skip
    prompt = golden_data("llama")["prompt_0"]
    requests = [request(str(i), prompt, seed=i, **options) for i, options in enumerate(params)]
    one, several = (run(spread_core("llama", size, layer_execution="looped"), requests) for size in (1, tensor))
    for key, choice in one.items():
        assert several[key].token_ids == choice.token_ids


def test_programs_are_kept_by_mesh(tmp_path, caplog):
    counts = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            core = spread_core("llama", 2, compilation_cache_dir=str(tmp_path), layer_execution="looped")
            core.runner.wait_for_programs()
        match = re.search(r"(\d+) programs in .*, (\d+) of them kept from before", caplog.text)
        assert match is not None
        counts.append(int(match[2]))
        data = golden_data("llama")
        results = run(core, [request("a", data["prompt_0"])])
        assert results["a", 0].token_ids == data["greedy_0"].tolist()
    assert counts[0] == 0
    assert counts[1] > 0
    assert describe(2).identity != describe(4).identity


def describe(tensor: int, **flags) -> ProgramSpecs:
    """The programs of the llama golden, from shapes alone."""
    hf_config = json.loads((GOLDENS / "llama" / "config.json").read_text())
    architecture = find_architecture(hf_config)
    config = EngineConfig.from_flags(
        model="llama", dtype="float32", max_num_seqs=8, max_num_batched_tokens=8, compile_sizes=[8],
        attention_backend="xla", layer_execution="scanned", tensor_parallel_size=tensor, expert_backend="cpu",
        block_size=16, **flags,
    )  # fmt: skip
    model_config = architecture.Config.from_hf(hf_config)
    model = nnx.eval_shape(
        lambda: architecture.Model(
            model_config, layer_execution="scanned", tensor_shards=tensor, max_model_len=128, rngs=nnx.Rngs(0)
        )
    )
    return ProgramSpecs(model, config, num_pages=64, max_model_len=128, mesh=make_mesh(jax.devices(), tensor=tensor))


def test_few_collectives_and_the_pool_in_place():
    specs = describe(2)
    program = specs.step(specs.plain_layouts[0]).compile()
    found = Counter(
        re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(", program.as_text())
    )
    # Embedding, attention and feed-forward block (in the loop); logits turned round; tokens.
    assert found == {"all-reduce": 3, "all-to-all": 1, "all-gather": 1}
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(specs.pool)) // 2
    assert program.memory_analysis().alias_size_in_bytes >= pool_bytes
    helpers = describe(2, kv_offloading_size=1.0).helpers()
    assert {"export", "import"} <= set(helpers)
    for helper in helpers.values():
        assert not re.search(r" (all-\w+|collective-permute|reduce-scatter)\(", helper.compile().as_text())


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (16, r"takes 16 devices, there are 8 of kind cpu: use a size from 1 to 8; XLA_FLAGS=.*device_count=16 in"),
        (0, r"tensor_parallel_size must be at least 1, got 0"),
    ],
)
def test_impossible_sizes(size, message):
    with pytest.raises(ConfigError, match=message):
        spread_core("llama", size)


def test_pages_are_spread_by_kv_heads_and_latents_are_everywhere():
    def pages(tensor: int, **spec) -> int:
        config = EngineConfig.from_flags(
            model="", dtype="float32", attention_backend="xla", tensor_parallel_size=tensor, max_num_seqs=8,
            max_num_batched_tokens=8, block_size=16,
        )  # fmt: skip
        return count_pages(config, CacheSpec(num_layers=2, head_dim=32, **spec), 10**6, lambda: 1 << 20)

    assert pages(4, num_kv_heads=4) == 4 * pages(1, num_kv_heads=4)
    assert pages(4, num_kv_heads=1, is_latent=True) == pages(1, num_kv_heads=1, is_latent=True) > 0
    with pytest.raises(ConfigError, match="has 3 parts, which cannot be spread"):
        pages(2, num_kv_heads=3)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_smollm2(tensor):
    """9 heads and 3 kv heads: padded for 2 and 4 devices."""
    flags = {"max_num_seqs": 8, "max_model_len": 512, "compile_sizes": [8], "max_num_batched_tokens": 64}
    core = EngineCore(EngineConfig.from_flags(model="smollm2-135m-instruct", tensor_parallel_size=tensor, **flags))
    paths = json.loads((GOLDENS / "real" / "smollm2-135m-instruct.json").read_text())["greedy"][:8]
    requests = [request(str(i), path["prompt_ids"], max_tokens=64, logprobs=0) for i, path in enumerate(paths)]
    results = run(core, requests)
    for i, path in enumerate(paths):
        assert results[str(i), 0].token_ids == path["greedy_ids"]
        for entry, expected in zip(results[str(i), 0].logprobs, path["logprobs"], strict=True):
            assert abs(entry.logprobs[0] - expected) < TOLERANCE
