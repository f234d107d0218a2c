"""Greedy tokens are the reference's with every feature on and off, alone and in combination."""

import itertools
import json

import pytest

from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from tests.engine_driver import GOLDENS, golden_data, make_core
from tests.paxserve.engine.feature_matrix import SETTINGS, FeatureBench, every, is_allowed, pairwise

FLAGS = {
    "block_size": 4, "max_num_seqs": 6, "compile_sizes": [32], "kv_offloading_size": 0.0005, "num_scheduler_steps": 4,
}  # fmt: skip


def golden_cases(name: str) -> tuple[list[list[int]], list[list[int]]]:
    data = golden_data(name)
    return [data[f"prompt_{i}"].tolist() for i in range(3)], [data[f"greedy_{i}"].tolist() for i in range(3)]


DISK_GIB = {"gemma3_text": 0.0006}
"""A page for each of seven groups of layers stands for the tokens that one page stands for elsewhere."""


@pytest.fixture
def disk_flags(tmp_path, name):
    """A folder that is full before a row has ended."""
    return {
        "kv_offloading_disk_path": str(tmp_path / "pages"), "kv_offloading_disk_size": DISK_GIB.get(name, 0.00012)
    }  # fmt: skip


def check_rows(core: EngineCore, rows, prompts, expected) -> None:
    """All rows, and that they were what they say: pages were found, brought back and taken away."""
    bench = FeatureBench(core)
    hits = restored = preempted = 0
    for row in rows:
        bench.check_row(row, prompts, expected)
        stats = core.stats()
        hits += stats.prefix_cache_hits
        restored += stats.offloaded_hits
        preempted += stats.num_preemptions
    counts = hits, restored, preempted, bench.num_from_disk
    assert min(counts) > 0, counts
    bench.pool.disk.close()


def test_every_two_values_meet():
    rows = pairwise(SETTINGS)
    assert all(is_allowed(row) for row in rows)
    assert len(rows) < 40
    for one, two in itertools.combinations(SETTINGS, 2):
        for a, b in itertools.product(SETTINGS[one], SETTINGS[two]):
            met = any(row[one] == a and row[two] == b for row in rows)
            assert met == is_allowed({one: a, two: b})


# A window of 4 pages in gemma3_text: some layers give pages back.
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), "gemma3_text"])
def test_goldens(name, disk_flags):
    check_rows(make_core(name, **FLAGS, **disk_flags), pairwise(SETTINGS), *golden_cases(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "deepseek_v2_lite"])
@pytest.mark.parametrize("flags", [
    {"attention_backend": "reference"}, {"kv_cache_dtype": "float32"},
    {"tensor_parallel_size": 2}, {"disable_hybrid_kv_cache_manager": True},
    {"block_size": 16, "kv_offloading_size": 0.002}, {"compile_sizes": [1, 4, 8]},
])  # fmt: skip
def test_goldens_with_other_programs(name, flags, disk_flags):
    """Settings that change what is compiled, each with all of the others."""
    core = make_core(name, **{**FLAGS, **disk_flags, **flags})
    check_rows(core, [*every(SETTINGS), *pairwise(SETTINGS)], *golden_cases(name))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    {}, {"kv_cache_dtype": "float32", "tensor_parallel_size": 3},
])  # fmt: skip
def test_smollm2(flags, tmp_path):
    flags = {
        "kv_offloading_disk_path": str(tmp_path / "pages"), "kv_offloading_disk_size": 0.05,
        "max_num_seqs": 6, "max_model_len": 96, "block_size": 16, "compile_sizes": [8], "max_num_batched_tokens": 32,
        "num_scheduler_steps": 4, "kv_offloading_size": 0.1, "num_gpu_blocks_override": 64, **flags,
    }  # fmt: skip
    core = EngineCore(EngineConfig.from_flags(model="smollm2-135m-instruct", **flags))
    paths = json.loads((GOLDENS / "real" / "smollm2-135m-instruct.json").read_text())["greedy"][:4]
    prompts, expected = [path["prompt_ids"] for path in paths], [path["greedy_ids"][:16] for path in paths]
    check_rows(core, [*every(SETTINGS), *pairwise(SETTINGS)], prompts, expected)
