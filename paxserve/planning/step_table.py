"""What the TPU compiler makes of whole steps: the table in docs/tpu.md.

`python -m paxserve.planning.step_table CONFIGS` writes it, with `--only TOPOLOGY …` no rows but those of these slices.
CONFIGS is a folder of config.json files named by model, as tests/models/configs is.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paxserve.config import EngineConfig
from paxserve.errors import ConfigError
from paxserve.planning.described_engine import describe_engine, describe_slice
from paxserve.planning.plan import ProgramPlan, plan_program

START, END = "<!-- step table -->", "<!-- end of the step table -->"
HEADER = (
    "| topology | model | tokens | rows | temporaries, MB | pool | collectives | operations, ms | roofline, ms |",
    "|---|---|---|---|---|---|---|---|---|",
)


class Case(NamedTuple):
    """Steps of one engine; all devices of the slice share each layer."""

    topology: str
    model: str
    sizes: tuple[int, ...] = (64, 2048)


CASES = (
    Case("v6e:1x1", "llama-3.1-8b", (64, 512, 2048)),
    Case("v6e:1x1", "qwen3-0.6b"),
    Case("v6e:1x1", "smollm2-135m", (64, 512, 2048)),
    Case("v5p:1x1x1", "llama-3.1-8b", (64,)),
    Case("tpu7x:1x1x1", "llama-3.1-8b"),
    Case("tpu7x:1x1x1", "qwen3-0.6b", (64,)),
    Case("v5e:2x2", "llama-3.1-8b", (64, 512, 2048)),
    Case("v6e:2x4", "llama-3.3-70b", (64, 512, 2048)),
    Case("v6e:4x4", "llama-3.3-70b", (64,)),
    Case("tpu7x:2x2x1", "llama-3.3-70b", (64,)),
    Case("tpu7x:2x2x1", "qwen3-30b-a3b"),
    Case("v6e:2x4", "mixtral-8x7b", (64,)),
    Case("v6e:2x4", "qwen3-30b-a3b"),
    Case("v6e:2x4", "deepseek-v2-lite"),
    Case("v6e:8x8", "qwen3-235b-a22b", (64,)),
)


def rows(case: Case, folder: Path) -> Iterator[str]:
    """A row of the table for each step; a refusal is a row too."""
    topology = describe_slice(case.topology)
    shards = 1 if topology.num_chips == 1 else topology.num_devices
    try:
        config = EngineConfig.from_flags(
            model=case.model, dtype="bfloat16", tensor_parallel_size=shards,
            max_num_seqs=64, max_model_len=8192, block_size=64,
        )  # fmt: skip
        engine = describe_engine(config, json.loads((folder / f"{case.model}.json").read_text()), topology)
    except ConfigError as error:
        yield f"| {case.topology} | {case.model} | | | refused: {error} | | | | |"
        return
    for layout in engine.specs.plain_layouts:
        if layout.num_tokens not in case.sizes:
            continue
        head = f"| {case.topology} | {case.model} | {layout.num_tokens} | {layout.num_rows} |"
        try:
            program = plan_program(engine, layout, 1024)
        except ConfigError as error:
            yield f"{head} refused: {' '.join(str(error).split())[:300]} | | | | |"
            continue
        yield f"{head} {measured(program)} |"


def measured(program: ProgramPlan) -> str:
    """The columns of a row behind the number of rows."""
    estimate = "not told" if program.time is None else f"{1e3 * program.time.operations:.2f}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in program.collectives.items())
    kinds = "not told" if program.time is None else kinds or "none"
    pool = "in place" if program.pool_is_aliased else "COPIED"
    temporaries, floor = program.temporary_bytes / 1e6, 1e3 * program.roofline_seconds
    return f"{temporaries:.1f} | {pool} | {kinds} | {estimate} | {floor:.2f}"


def main() -> None:
    """Compile what is asked for and put the table into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--document", type=Path, default=Path("docs/tpu.md"))
    parser.add_argument("--only", nargs="+", metavar="TOPOLOGY", help="leave the rows of other slices as they are")
    arguments = parser.parse_args()
    old = arguments.document.read_text().split(START)[1].split(END)[0].splitlines()
    lines = [*HEADER]
    for case in CASES:
        if arguments.only and case.topology not in arguments.only:
            lines += [line for line in old if line.startswith(f"| {case.topology} | {case.model} |")]
            continue
        for row in rows(case, arguments.configs):
            lines.append(row)
            print(row, flush=True)
    # Read again: compiling has taken minutes.
    head, rest = arguments.document.read_text().split(START)
    _, tail = rest.split(END)
    arguments.document.write_text("\n".join([f"{head}{START}", "", *lines, "", f"{END}{tail}"]))


if __name__ == "__main__":
    main()
