"""The plan of one engine on one slice: what fits, what its programs take, how long its steps would."""

import dataclasses
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax

from paxserve.engine.batch import Layout
from paxserve.errors import ConfigError
from paxserve.planning.cycles import Cycles, read_cycles
from paxserve.planning.described_engine import DescribedEngine, shard_bytes
from paxserve.planning.step_time import StepTime, StepWork, decode_work, prefill_work, roofline, step_time

DECODE_ROWS = (8, 64)
"""Batch sizes that are planned besides the largest."""

NUM_TOP = 8
"""Operations that are listed, the most expensive ones."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a program and its share of the estimate."""

    name: str
    type: str
    cycles: int
    """All runs together."""
    trips: int


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """One compiled step. Bytes are those of one device, as the compiler's memory analysis has them."""

    num_tokens: int
    num_rows: int
    is_rich: bool
    compile_seconds: float
    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    total_bytes: int
    """Arguments, results that overwrite none of them, temporaries and code."""
    pool_is_aliased: bool
    collectives: dict[str, int]
    """How often a step runs each kind."""
    cycles: int
    work: StepWork
    time: StepTime | None
    """None where the compiler gives no estimates."""
    roofline_seconds: float
    """What no program for this chip can do without."""
    operations: list[Operation]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that one step after another would compute, where there is an estimate."""
        return None if self.time is None else self.work.num_tokens / self.time.total


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `paxserve plan` says. Bytes are those of one device."""

    engine: DescribedEngine
    programs: list[ProgramPlan]

    @property
    def memory(self) -> dict[str, int]:
        """The split of a device's HBM in bytes: the greatest of each over the programs; `free` is what is left."""
        engine = self.engine
        pool = sum(map(shard_bytes, jax.tree.leaves(engine.specs.pool)))
        rich = sum(map(shard_bytes, jax.tree.leaves(engine.specs.rich)))
        largest = max(self.programs, key=lambda program: program.total_bytes)
        beside = 0 if largest.is_rich else rich
        split = {
            "weights": engine.weight_bytes,
            "kv_pool": pool,
            "temporaries": largest.temporary_bytes,
            "penalties_and_biases": rich,
            "code": largest.code_bytes,
            "other": largest.total_bytes + beside - engine.weight_bytes - pool - rich
            - largest.temporary_bytes - largest.code_bytes,
        }  # fmt: skip
        return split | {"free": engine.topology.chip.hbm_bytes - sum(split.values())}

    @property
    def num_engine_programs(self) -> int:
        """Programs that an engine compiles in all, helpers included."""
        specs = self.engine.specs
        return len(specs.layouts) + len(specs.helpers())


def make_plan(engine: DescribedEngine, *, context: int, report: Any = None) -> Plan:
    """Compile the steps that tell most and return the plan; ConfigError where one does not fit.

    `report` is called with a line about each program before it is compiled.
    """
    programs = []
    for layout in representative_layouts(engine):
        if report is not None:
            kind = " with log-probabilities and penalties" if layout.is_rich else ""
            report(f"compiling the step of {layout.num_tokens} tokens of {layout.num_rows} rows{kind} …")
        programs.append(plan_program(engine, layout, context))
    return Plan(engine=engine, programs=programs)


def representative_layouts(engine: DescribedEngine) -> list[Layout]:
    """Steps of some decode rows, of all, and of the whole budget."""
    specs, (num_slots, _) = engine.specs, engine.config.scheduler.limits
    plain = specs.plain_layouts
    sizes = [next((x for x in plain if x.num_tokens >= rows), plain[-1]) for rows in (*DECODE_ROWS, num_slots)]
    chosen = {layout: None for layout in sizes if layout.num_tokens <= num_slots}
    return [*chosen, *([plain[-1]] if plain[-1] not in chosen else [])]


def plan_program(engine: DescribedEngine, layout: Layout, context: int) -> ProgramPlan:
    """Compile one step and read what the compiler says about it."""
    started = time.perf_counter()
    try:
        compiled = engine.specs.step(layout).compile()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"The step of {layout.num_tokens} tokens: {error}") from error
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(_advice(engine, layout, str(error))) from error
    return read_program(engine, layout, compiled, seconds=time.perf_counter() - started, context=context)


def read_program(
    engine: DescribedEngine, layout: Layout, compiled: Any, *, seconds: float, context: int
) -> ProgramPlan:
    """What the compiler says about a compiled step that took `seconds` to compile."""
    memory, cycles = compiled.memory_analysis(), _cycles(compiled)
    is_decode = layout.num_tokens == layout.num_rows
    work = decode_work(layout.num_rows, context) if is_decode else prefill_work(layout.num_tokens)
    pool_bytes = sum(map(shard_bytes, jax.tree.leaves(engine.specs.pool)))
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return ProgramPlan(
        num_tokens=layout.num_tokens,
        num_rows=layout.num_rows,
        is_rich=layout.is_rich,
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=code,
        total_bytes=memory.argument_size_in_bytes + max(0, fresh) + memory.temp_size_in_bytes + code,
        pool_is_aliased=memory.alias_size_in_bytes >= pool_bytes,
        collectives=dict(_collectives(cycles)),
        cycles=cycles.total,
        work=work,
        time=step_time(engine, cycles, work) if cycles.costs else None,
        roofline_seconds=roofline(engine, work),
        operations=[
            Operation(
                name=cost.instruction.op_name or cost.instruction.name, type=cost.instruction.type.split("{")[0],
                cycles=cost.cycles, trips=cost.trips,
            )
            for cost in cycles.top(NUM_TOP)
        ],
    )  # fmt: skip


def _cycles(compiled: Any) -> Cycles:
    """The step's estimates; none where libtpu fails to write the program's text, as 0.0.52 does for some steps."""
    try:
        return read_cycles(compiled.as_text())
    except jax.errors.JaxRuntimeError:
        return Cycles([], [], [], [])


def _collectives(cycles: Cycles) -> Counter[str]:
    counts: Counter[str] = Counter()
    for cost in cycles.collectives:
        counts[cost.kind] += cost.trips
    return counts


def _advice(engine: DescribedEngine, layout: Layout, message: str) -> str:
    """What to change so that a program fits the memory that the compiler found too small."""
    name = f"The step of {layout.num_tokens} tokens of {layout.num_rows} rows"
    over = re.search(r"[Ee]xceed\w* (?:hbm )?(?:capacity )?by ([\d.]+)([KMG])", message)
    if "RESOURCE_EXHAUSTED" not in message and over is None:
        return f"{name} does not compile for {engine.topology.name}: {message.splitlines()[0]}"
    cache, hbm = engine.config.cache, engine.topology.chip.hbm_bytes
    if over is None or cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
        return f"{name} does not fit the HBM of {engine.topology.name}: make the KV pool smaller. {message[:200]}"
    missing = float(over[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[over[2]]
    share = cache.gpu_memory_utilization - -(-missing * 100 // hbm) / 100 - 0.01
    return (
        f"{name} needs {missing / 2**30:.2f} GiB more than the {hbm / 2**30:.2f} GiB of a device of "
        f"{engine.topology.name}: --gpu-memory-utilization {share:.2f} would make room."
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, for `--json`."""
    engine = plan.engine
    return {
        "model": engine.config.model.model,
        "topology": engine.topology.name,
        "num_chips": engine.topology.num_chips,
        "num_hosts": engine.topology.num_hosts,
        "tensor_parallel_size": engine.config.parallel.tensor_parallel_size,
        "dtype": engine.config.model.dtype,
        "attention_backend": engine.config.compile.attention_backend,
        "max_model_len": engine.max_model_len,
        "block_size": engine.config.cache.block_size,
        "num_pages": engine.num_pages,
        "page_tables_per_request": engine.specs.shape.groups.num_groups,
        "full_length_requests": engine.full_length_requests,
        "hbm_bytes": engine.topology.chip.hbm_bytes,
        "memory_bytes": plan.memory,
        "num_engine_programs": plan.num_engine_programs,
        "programs": [
            dataclasses.asdict(program)
            | {"seconds": program.time and program.time.total, "tokens_per_second": program.tokens_per_second}
            for program in plan.programs
        ],
    }
