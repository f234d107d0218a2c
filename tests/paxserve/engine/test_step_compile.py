"""The engine's own steps compiled by the real TPU compiler for described slices: they fit, in place, without waste.

Bounds on temporaries are some 1.5 times what libtpu 0.0.42 needs. Skipped without libtpu, which only Linux has.
"""

import json
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from paxserve.config import EngineConfig
from paxserve.planning.compiled_text import CompiledText
from paxserve.planning.described_engine import describe_engine, shard_bytes
from paxserve.planning.plan import Plan, read_program
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
    shards = 1 if described.num_chips == 1 else described.num_devices
    config = EngineConfig.from_flags(
        model=model, dtype="bfloat16", attention_backend="tpu", tensor_parallel_size=shards, **FLAGS
    )
    return describe_engine(config, hf_config, described)


@lru_cache(maxsize=1)
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


def case_name(case):
    return "-".join(map(str, case[:3]))


class Case(NamedTuple):
    """One step of one engine on one slice, and what is expected of it."""

    model: str
    topology: str
    num_tokens: int
    temporaries: int
    """MiB, at most."""
    collectives: tuple[int, int, int] = (0, 0, 0)
    """How many all-reduce, all-gather and all-to-all a step runs."""
    cycles: float = math.inf
    """Estimated cycles of all operations, at most: what docs/performance.md and docs/models.md have won."""


# An all-reduce behind the attention and the feed-forward block of every layer, and one of the token table. Logits are
# turned round by one all-to-all, so that each device samples for its rows, and the tokens of all are gathered.
DEFAULT = [
    Case("llama-3.1-8b", "v6e:1x1", 64, 48, cycles=21e6),
    Case("llama-3.1-8b", "tpu7x:1x1x1", 64, 100),
    Case("llama-3.3-70b", "v6e:2x4", 64, 12, (162, 0, 1)),
    Case("qwen3-30b-a3b", "v6e:2x4", 64, 12, (98, 0, 1)),
    Case("deepseek-v2-lite", "v6e:2x4", 64, 12, (56, 0, 1)),
    Case("smollm2-135m", "v6e:1x1", 512, 24),
]
FURTHER = [
    Case("qwen3-0.6b", "v6e:1x1", 64, 64),
    Case("smollm2-135m", "v6e:1x1", 64, 24),
    Case("llama-3.1-8b", "v6e:1x1", 512, 48),
    Case("llama-3.1-8b", "v6e:1x1", 2048, 120),
    Case("qwen3-0.6b", "v6e:1x1", 2048, 150),
    Case("smollm2-135m", "v6e:1x1", 2048, 150),
    Case("llama-3.1-8b", "v5e:2x2", 64, 12, (66, 0, 1)),
    Case("llama-3.1-8b", "v5e:2x2", 512, 16, (66, 0, 1)),
    Case("llama-3.1-8b", "v5e:2x2", 2048, 80, (66, 0, 1)),
    Case("llama-3.3-70b", "v6e:2x4", 512, 20, (162, 0, 1)),
    Case("llama-3.3-70b", "v6e:2x4", 2048, 80, (162, 0, 1)),
    Case("llama-3.1-8b", "v5p:1x1x1", 64, 100),
    Case("llama-3.1-8b", "tpu7x:1x1x1", 2048, 170),
    Case("qwen3-0.6b", "tpu7x:1x1x1", 64, 170),
    Case("llama-3.3-70b", "tpu7x:2x2x1", 64, 16, (162, 0, 1)),
    Case("qwen3-30b-a3b", "tpu7x:2x2x1", 64, 14, (98, 0, 1)),
    Case("qwen3-30b-a3b", "tpu7x:2x2x1", 2048, 260, (98, 0, 1)),
    Case("llama-3.3-70b", "v6e:4x4", 64, 12, (162, 0, 1)),
    Case("qwen3-235b-a22b", "v6e:8x8", 64, 10, (190, 0, 1)),
    Case("mixtral-8x7b", "v6e:2x4", 64, 12, (66, 0, 1)),
    Case("qwen3-30b-a3b", "v6e:2x4", 2048, 180, (98, 0, 1), cycles=30e6),
    Case("deepseek-v2-lite", "v6e:2x4", 2048, 170, (56, 0, 1), cycles=28e6),
]
SLOW = [pytest.param(case, marks=pytest.mark.slow, id=case_name(case)) for case in FURTHER]


@pytest.mark.parametrize("case", [*DEFAULT, *SLOW], ids=case_name)
def test_step(case):
    engine, compiled, program = compiled_step(case.model, case.topology, case.num_tokens)
    assert program.pool_is_aliased
    assert pool_sized(engine, compiled.as_text()) == []
    assert program.temporary_bytes <= case.temporaries * MIB
    assert program.total_bytes <= engine.topology.chip.hbm_bytes
    memory, analysis = Plan(engine=engine, programs=[program]).memory, compiled.memory_analysis()
    assert memory["temporaries"] == analysis.temp_size_in_bytes
    # What goes in and comes out is the weights, the pool, and little else: a plain step has no biases and penalties.
    arguments = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert memory["weights"] + memory["kv_pool"] + memory["other"] == arguments
    assert 0 <= memory["other"] < 32 * MIB
    assert sum(memory.values()) == engine.topology.chip.hbm_bytes
    expected = dict(zip(("all-reduce", "all-gather", "all-to-all"), case.collectives, strict=True))
    assert program.collectives == {kind: count for kind, count in expected.items() if count}
    assert program.cycles <= case.cycles
    if case[:3] == ("llama-3.1-8b", "v6e:1x1", 64):
        assert max(op.cycles for op in program.operations) < 4.9e6  # products; no weights are copied


@pytest.mark.slow
def test_several_steps_in_one_program_move_nothing():
    hf_config, slice_ = json.loads((CONFIGS / "llama-3.1-8b.json").read_text()), describe("v6e:1x1")
    flags = {**FLAGS, "num_scheduler_steps": 8}
    config = EngineConfig.from_flags(model="llama-3.1-8b", dtype="bfloat16", attention_backend="tpu", **flags)
    engine = describe_engine(config, hf_config, slice_)
    compiled = engine.specs.step(engine.specs.multi_layouts[-1]).compile()
    memory = compiled.memory_analysis()
    pool = sum(map(shard_bytes, jax.tree.leaves(engine.specs.pool)))
    assert memory.alias_size_in_bytes >= pool
    # As for one step: 33 MB of them are the logits of 64 rows in float32.
    assert memory.temp_size_in_bytes <= DEFAULT[0].temporaries * MIB
    assert pool_sized(engine, compiled.as_text()) == []


def test_copies_of_the_pool_would_be_seen():
    engine, compiled, _ = compiled_step(*DEFAULT[-1][:3])
    (pool,) = jax.tree.leaves(engine.specs.pool)
    sizes = ",".join(map(str, pool.shape))
    text = f"{compiled.as_text()}\n%other (p: s32[]) -> s32[] {{\n  %seen = bf16[{sizes}]{{4,3,2,1,0}} copy(%p)\n}}\n"
    assert pool_sized(engine, text) == ["seen"]
