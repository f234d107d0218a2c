"""How long a step would take: the compiler's estimates, what they leave out, and the floor that the chip sets.

Operations of XLA: estimated cycles at the chip's clock; of those that sparse cores run, which carry no estimate, the
result's bytes read and written at the HBM's rate. Kernels, which carry none either: the time to read keys and values,
or the experts that tokens go to, at the HBM's rate, or to multiply at the matrix unit's. Collectives: their bytes at
the interconnect's rate, without latency.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from paxserve.planning.cycles import Cycles
from paxserve.planning.described_engine import DescribedEngine
from sharding.topology import ChipFacts


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The tokens of a step: rows of one token each, or one prompt's first tokens."""

    num_tokens: int
    num_rows: int
    context: int
    """Cached tokens that a query attends to, on average."""
    read_tokens: int
    """Cached tokens whose keys and values are read in each layer, all rows together."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step."""

    operations: float
    attention: float
    experts: float
    """Of the kernel for experts; 0 where XLA multiplies them."""
    collectives: float

    @property
    def total(self) -> float:
        """The parts one after another."""
        return self.operations + self.attention + self.experts + self.collectives


def decode_work(num_rows: int, context: int) -> StepWork:
    """A step of rows that decode at `context` tokens."""
    return StepWork(num_tokens=num_rows, num_rows=num_rows, context=context, read_tokens=num_rows * context)


def prefill_work(num_tokens: int) -> StepWork:
    """A step that computes the first `num_tokens` tokens of one prompt."""
    return StepWork(num_tokens=num_tokens, num_rows=1, context=num_tokens // 2, read_tokens=num_tokens)


def step_time(engine: DescribedEngine, cycles: Cycles, work: StepWork) -> StepTime:
    """Seconds of a step with this work by the program with these costs."""
    chip, shards = engine.topology.chip, engine.config.parallel.tensor_parallel_size
    attention = max(
        _kv_bytes(engine, work) / chip.hbm_bytes_per_second, _attention_flops(engine, work) / chip.bf16_flops
    )
    collectives = sum(
        cost.trips * collective_seconds(cost.kind, cost.instruction.result_bytes, shards, chip)
        for cost in cycles.collectives
    )
    unrated = sum(2 * cost.trips * cost.instruction.result_bytes for cost in cycles.unrated)
    return StepTime(
        operations=cycles.total / chip.clock_hz + unrated / chip.hbm_bytes_per_second,
        attention=attention,
        experts=_expert_seconds(engine, work) if engine.config.compile.expert_backend == "tpu" else 0.0,
        collectives=collectives,
    )


def roofline(engine: DescribedEngine, work: StepWork) -> float:
    """Seconds that no program for this chip can do without: the weights that the step needs and the keys and values
    read once at the HBM's rate, or the products at the matrix unit's."""
    chip = engine.topology.chip
    always = engine.weight_bytes - engine.table_bytes - engine.expert_bytes
    itemsize = jnp.dtype(engine.config.model.dtype).itemsize
    read = always + _read_expert_bytes(engine, work) + _kv_bytes(engine, work)
    flops = 2 * work.num_tokens * always / itemsize + _expert_flops(engine, work) + _attention_flops(engine, work)
    return max(read / chip.hbm_bytes_per_second, flops / chip.bf16_flops)


def collective_seconds(kind: str, result_bytes: int, num_devices: int, chip: ChipFacts) -> float:
    """Seconds of one collective over `num_devices` by its bytes alone; `result_bytes` are those of one device."""
    if num_devices == 1:
        return 0.0
    share = (num_devices - 1) / num_devices
    factor = {"all-reduce": 2 * share, "reduce-scatter": num_devices - 1}.get(kind, share)
    return factor * result_bytes / chip.ici_bytes_per_second


def _kv_bytes(engine: DescribedEngine, work: StepWork) -> float:
    return work.read_tokens * engine.page_bytes / engine.config.cache.block_size


def _read_expert_bytes(engine: DescribedEngine, work: StepWork) -> float:
    """Bytes of the experts that some token goes to, if every expert is as likely as the next."""
    return engine.expert_bytes * (1 - (1 - engine.routed_share) ** work.num_tokens)


def _expert_flops(engine: DescribedEngine, work: StepWork) -> float:
    itemsize = jnp.dtype(engine.config.model.dtype).itemsize
    return 2 * work.num_tokens * engine.routed_share * engine.expert_bytes / itemsize


def _expert_seconds(engine: DescribedEngine, work: StepWork) -> float:
    chip = engine.topology.chip
    read, flops = _read_expert_bytes(engine, work), _expert_flops(engine, work)
    return max(read / chip.hbm_bytes_per_second, flops / chip.bf16_flops)


def _attention_flops(engine: DescribedEngine, work: StepWork) -> float:
    config, spec = engine.model.config, engine.model.cache_spec
    per_token = 4 * work.context * config.num_attention_heads * spec.head_dim * spec.num_layers
    return work.num_tokens * per_token / engine.config.parallel.tensor_parallel_size
