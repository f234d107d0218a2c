"""Plans as text: tables for a terminal, and the command that would serve what was planned."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paxserve.planning.described_engine import DescribedEngine
from paxserve.planning.plan import Plan, ProgramPlan
from paxserve.planning.slices import SliceAnswer, slice_name

GIB = 2**30

WIDTH = 160
"""Columns of a table where no terminal says how many there are."""

NAMES = {
    "weights": "weights",
    "kv_pool": "KV pool",
    "temporaries": "temporaries of the largest program",
    "penalties_and_biases": "penalties and biases of all slots",
    "code": "code of the largest program",
    "other": "slot state, inputs, padding",
    "free": "free",
}


def serve_command(engine: DescribedEngine, given: Mapping[str, Any]) -> str:
    """The `paxserve serve` command for this engine; `given` are the flags that the user set."""
    flags = dict(given) | {
        "tensor_parallel_size": engine.config.parallel.tensor_parallel_size,
        "block_size": engine.config.cache.block_size,
    }
    model = str(flags.pop("model"))
    words = ["paxserve", "serve", str(Path(model).parent) if model.endswith(".json") else model]
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return shlex.join(words)


def make_console() -> Console:
    """As wide as the terminal; as wide as the widest table where there is none to fit."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def print_plan(plan: Plan, given: Mapping[str, Any], *, num_operations: int, console: Console) -> None:
    """The whole plan, a table a subject."""
    engine, topology = plan.engine, plan.engine.topology
    shards = engine.config.parallel.tensor_parallel_size
    console.print(
        f"[bold]{engine.config.model.model}[/] in {engine.config.model.dtype} on {topology.name}: "
        f"{topology.num_chips} chips, {topology.num_hosts} hosts, "
        f"tensor-parallel over {shards} of {topology.num_devices} devices"
    )
    console.print(_memory_table(plan))
    page_size, groups = engine.config.cache.block_size, engine.specs.shape.groups
    capacity = f"{engine.num_pages * page_size:,} tokens"
    if groups.num_groups > 1:
        capacity = f"{groups.size} of {engine.specs.num_layers} layers each, {groups.num_groups} page tables a request"
    console.print(
        f"KV pool: {engine.num_pages:,} pages of {page_size} tokens ({capacity}): "
        f"{engine.full_length_requests:.1f} requests of {engine.max_model_len:,} tokens at once"
    )
    if engine.full_length_requests < 1:
        console.print(f"[red]No request of the full length fits: --max-model-len {engine.longest_request} would.[/]")
    console.print(_program_table(plan))
    if any(program.time is None for program in plan.programs):
        console.print("?: this libtpu cannot print the program; the one that jax[tpu] asks for may.")
    mean = sum(p.compile_seconds for p in plan.programs) / len(plan.programs)
    console.print(
        f"An engine compiles {plan.num_engine_programs} programs, helpers included; these took {mean:.0f} s each here"
    )
    for program in plan.programs[:1] if num_operations else []:
        console.print(_operation_table(program, num_operations))
    console.print("Nothing of this was run on a TPU: see docs/plan.md for what the estimates are made of.")
    console.print(f"Serve it: {serve_command(engine, given)}", soft_wrap=True)
    name = slice_name(topology)
    console.print(f"Slice: tpu_configs/{name}.toml" if name else "Slice: none in tpu_configs")


def _memory_table(plan: Plan) -> Table:
    table = Table(title="HBM of one device", title_justify="left")
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("%", justify="right")
    hbm = plan.engine.topology.chip.hbm_bytes
    for name, size in (*plan.memory.items(), ("all of it", hbm)):
        table.add_row(NAMES.get(name, name), f"{size / GIB:.2f}", f"{100 * size / hbm:.1f}")
    return table


def _program_table(plan: Plan) -> Table:
    table = Table(title="Programs compiled, and a step of each by estimate", title_justify="left")
    headers = (
        "step", "compile s", "temporaries MiB", "pool", "operations ms", "attention ms", "experts ms",
        "collectives ms", "step ms", "roofline ms", "tokens/s", "collectives",
    )  # fmt: skip
    for header in headers:
        table.add_column(header, justify="left" if header in ("step", "pool", "collectives") else "right")
    for p in plan.programs:
        is_decode = p.num_tokens == p.num_rows
        kind = f"decode {p.num_rows} rows at {p.work.context}" if is_decode else f"prefill {p.num_tokens}"
        t = p.time
        parts = 5 * (None,) if t is None else (t.operations, t.attention, t.experts, t.collectives, t.total)
        times = ["?" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in (*parts, p.roofline_seconds)]
        rate, collectives = p.tokens_per_second, [f"{n} {kind}" for kind, n in p.collectives.items()]
        table.add_row(
            kind + (" (rich)" if p.is_rich else ""), f"{p.compile_seconds:.1f}", f"{p.temporary_bytes / 2**20:.0f}",
            "in place" if p.pool_is_aliased else "COPIED", *times,
            "?" if rate is None else f"{rate:,.0f}", "?" if t is None else ", ".join(collectives) or "none",
        )  # fmt: skip
    return table


def _operation_table(program: ProgramPlan, count: int) -> Table:
    total = program.cycles / 1e6
    title = f"Most expensive operations of the step of {program.num_tokens} tokens, of {total:.2f} million cycles"
    table = Table(title=title, title_justify="left")
    for header in ("operation", "result", "trips", "million cycles"):
        table.add_column(header, justify="left" if header in ("operation", "result") else "right")
    for operation in program.operations[:count]:
        name = operation.name.removeprefix("jit(step)/").replace("while/body/closed_call/", "layer: ")
        table.add_row(name, operation.type, str(operation.trips), f"{operation.cycles / 1e6:.2f}")
    return table


def print_slices(answers: Sequence[SliceAnswer], console: Console) -> None:
    """Which slices are enough, the cheapest first, and why the others are not."""
    table = Table(title="Slices that are enough, by arithmetic (nothing was compiled)", title_justify="left")
    for header in ("slice", "topology", "chips", "price/h", "weights GiB", "full requests", "decode tokens/s at best"):
        table.add_column(header, justify="left" if header in ("slice", "topology") else "right")
    for a in answers:
        if a.refusal is None:
            table.add_row(
                a.name, a.topology, str(a.num_chips), "" if a.price_per_hour is None else f"{a.price_per_hour:.2f}",
                f"{a.weight_bytes / GIB:.1f}", f"{a.full_length_requests:.1f}", f"{a.roofline_tokens_per_second:,.0f}",
            )  # fmt: skip
    console.print(table)
    for a in answers:
        if a.refusal is not None:
            console.print(f"{a.name} is not enough: {a.refusal}", highlight=False)
