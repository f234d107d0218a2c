"""The engine's own steps compiled by the real TPU compiler for described slices: they fit, in place, without waste.

Bounds on temporaries are some 1.5 times what libtpu 0.0.52 needs. Skipped without libtpu, which only Linux has.
"""

import json
from functools import cache
from pathlib import Path

import jax
import pytest

from paxserve.config import EngineConfig
from paxserve.planning.compiled_text import CompiledText
from paxserve.planning.described_engine import describe_engine, shard_bytes
from paxserve.planning.plan import read_program
from sharding.topology import describe

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_aot

CONFIGS = Path(__file__).parents[2] / "models" / "configs"
FLAGS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192, "block_size": 64}
MOVES_NOTHING = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "custom-call", "conditional"}
MIB = 1 << 20


@cache
def engine_of(model, topology):
    hf_config = json.loads((CONFIGS / f"{model}.json").read_text())
    described = describe(topology)
    config = EngineConfig.from_flags(
        model=model, dtype="bfloat16", attention_backend="tpu", tensor_parallel_size=described.num_devices, **FLAGS
    )
    return describe_engine(config, hf_config, described)


def compiled_step(model, topology, num_tokens):
    engine = engine_of(model, topology)
    layout = next(x for x in engine.specs.plain_layouts if x.num_tokens == num_tokens)
    compiled = engine.specs.step(layout).compile()
    return engine, compiled, read_program(engine, layout, compiled, seconds=0.0, context=1024)


def pool_sized(engine, text):
    """Instructions outside the kernels whose result is as large as one layer of the pool, or larger."""
    pool = sum(map(shard_bytes, jax.tree.leaves(engine.specs.pool)))
    layer = pool // engine.model.cache_spec.num_layers
    return [
        instruction.name
        for instruction in CompiledText(text).executed()
        if instruction.opcode not in MOVES_NOTHING and instruction.result_bytes >= layer
    ]


ONE_CHIP = [
    ("llama-3.1-8b", "v6e:1x1", 64, 8),
    ("smollm2-135m", "v6e:1x1", 512, 24),
    pytest.param("qwen3-0.6b", "v6e:1x1", 64, 8, marks=pytest.mark.slow),
    pytest.param("smollm2-135m", "v6e:1x1", 64, 8, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", "v6e:1x1", 512, 64, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", "v6e:1x1", 2048, 300, marks=pytest.mark.slow),
    pytest.param("qwen3-0.6b", "v6e:1x1", 2048, 100, marks=pytest.mark.slow),
    pytest.param("smollm2-135m", "v6e:1x1", 2048, 80, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "topology", "num_tokens", "temporaries"), ONE_CHIP)
def test_step_on_one_chip(model, topology, num_tokens, temporaries):
    engine, compiled, program = compiled_step(model, topology, num_tokens)
    assert program.pool_is_aliased
    assert pool_sized(engine, compiled.as_text()) == []
    assert program.temporary_bytes <= temporaries * MIB
    assert program.total_bytes <= engine.topology.chip.hbm_bytes
    assert program.collectives == {}
    if (model, num_tokens) == ("llama-3.1-8b", 64):
        assert program.cycles < 21e6  # before docs/performance.md's changes: 37.6e6
        assert max(op.cycles for op in program.operations) < 4.9e6  # products; no weights are copied


def test_copies_of_the_pool_would_be_seen():
    engine, compiled, _ = compiled_step("smollm2-135m", "v6e:1x1", 512)
    (pool,) = jax.tree.leaves(engine.specs.pool)
    sizes = ",".join(map(str, pool.shape))
    text = f"{compiled.as_text()}\n%other (p: s32[]) -> s32[] {{\n  %seen = bf16[{sizes}]{{4,3,2,1,0}} copy(%p)\n}}\n"
    assert pool_sized(engine, text) == ["seen"]
