"""What the real TPU compiler makes of the TPU backend: `python -m pallas_kernels.ragged_paged_attention.compile_table`.

Compiles 32 layers of attention for described chips, with libtpu and no TPU, and writes the table in docs/tpu.md.
"""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.ragged_paged_attention import tpu
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.quantisation import is_quantised

TOPOLOGIES = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1", "v4:1x1x1")
START, END = "<!-- compile table -->", "<!-- end of the compile table -->"


class Model(NamedTuple):
    """The attention of a model: query heads, kv heads, head size, and what its logits go through."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    """Of latent attention."""


MODELS = {
    "Llama-3.1-8B": Model(32, 8, 128),
    "Qwen3-0.6B": Model(16, 8, 128),
    "SmolLM2-135M": Model(9, 3, 64),
    "Gemma-like": Model(8, 4, 256, window=4096, softcap=50.0),
    "gpt-oss-like": Model(64, 8, 64, window=128, has_sinks=True),
    "Phi-3-like": Model(32, 32, 96),
    "Phi-2-like": Model(32, 32, 80),
    "Falcon-like (MQA)": Model(71, 1, 64),
    "DeepSeek-V3 (latents)": Model(128, 1, 576, value_dim=512),
    "DeepSeek-V3 (latents), an eighth": Model(16, 1, 576, value_dim=512),
}


QUANTISED = (("Llama-3.1-8B", 64, 64), ("Llama-3.1-8B", 2048, 64), ("SmolLM2-135M", 64, 32), ("Gemma-like", 64, 128))
"""Model, tokens and page size of the cases with quantised pages."""


class Case(NamedTuple):
    """One program."""

    topology: str
    model: str
    num_tokens: int
    num_rows: int
    page_size: int
    dtype: str = "bfloat16"
    max_model_len: int = 8192
    num_layers: int = 32


class Result(NamedTuple):
    """What came out of compiling it; sizes in bytes."""

    case: Case
    temporary: int
    aliased: int
    pool: int
    refusal: str | None
    text: str


def lower(case: Case) -> tuple[Any, int]:
    """The lowered program of all layers over one donated pool, and the pool's size in bytes."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    model = MODELS[case.model]
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=case.topology, chips_per_host_bounds=(1, 1, 1)
    )
    mesh = Mesh(np.array(description.devices[:1]), ("tensor",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def one_pool() -> Any:
        return tpu.make_pool(
            num_layers=case.num_layers, num_pages=8192 // case.page_size, page_size=case.page_size,
            num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=case.dtype,
            is_latent=model.value_dim is not None,
        )  # fmt: skip

    def step(pool: Any, q: jax.Array, k: jax.Array, v: jax.Array, metadata: Any, sinks: Any) -> Any:
        def layer(carry: tuple[jax.Array, Any], index: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
            q, pool = carry
            out, pool = tpu.ragged_paged_attention(
                q, k, v if model.value_dim is None else None, pool, index, metadata, scale=model.head_dim**-0.5,
                window=model.window, softcap=model.softcap, sinks=sinks, value_dim=model.value_dim,
            )  # fmt: skip
            return (jnp.pad(out, ((0, 0), (0, 0), (0, model.head_dim - out.shape[-1]))), pool), None

        return jax.lax.scan(layer, (q, pool), jnp.arange(case.num_layers))[0]

    pool = jax.eval_shape(one_pool)
    rows, width = case.num_rows, case.max_model_len // case.page_size
    metadata = AttentionMetadata(*(array(shape, jnp.int32) for shape in ((rows + 1,), (rows,), (rows, width), ())))
    activations = jnp.bfloat16 if is_quantised(case.dtype) else case.dtype
    q, kv = (
        array((case.num_tokens, heads, model.head_dim), activations) for heads in (model.num_heads, model.num_kv_heads)
    )
    sinks = array((model.num_heads,), jnp.float32) if model.has_sinks else None
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), pool)
        program = jax.jit(step, donate_argnums=0).lower(placed, q, kv, kv, metadata, sinks)
    return program, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))


def compile_case(case: Case) -> Result:
    """Compile one program; a refusal is a result too."""
    try:
        program, pool = lower(case)
        compiled = program.compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return Result(case, 0, 0, 0, str(error), "")
    memory = compiled.memory_analysis()
    return Result(case, memory.temp_size_in_bytes, memory.alias_size_in_bytes, pool, None, compiled.as_text())


def pool_copies(result: Result) -> list[str]:
    """Instructions other than the kernels that produce anything as large as one layer of the pool."""
    layer = result.pool // result.case.num_layers
    sizes = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "f8e4m3fn": 1, "s8": 1}
    found = []
    for line in result.text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?(\S+) = (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if match is None or match[2] not in sizes or match[4] in ("parameter", "get-tuple-element", "bitcast"):
            continue
        size = int(np.prod([int(n) for n in match[3].split(",")])) * sizes[match[2]]
        if size >= layer:
            found.append(line.strip()[:200])
    return found


def cases() -> Iterator[Case]:
    """The table: every model on every chip, one model at other sizes, and quantised pages."""
    for topology in TOPOLOGIES:
        for model in MODELS:
            yield Case(topology, model, 64, 64, 64)
        for num_tokens, page_size in ((64, 16), (512, 64), (2048, 64)):
            yield Case(topology, "Llama-3.1-8B", num_tokens, 64, page_size)
    for topology in TOPOLOGIES:
        for dtype in ("int8", "float8_e4m3fn"):
            for model, num_tokens, page_size in QUANTISED:
                yield Case(topology, model, num_tokens, 64, page_size, dtype)
    for num_tokens, num_rows, page_size in ((256, 256, 128), (2048, 256, 32)):
        yield Case("v6e:1x1", "Llama-3.1-8B", num_tokens, num_rows, page_size)
    yield Case("v6e:1x1", "Llama-3.1-8B", 64, 64, 256, "float32")
    yield Case("v6e:1x1", "Llama-3.1-8B", 64, 256, 16, max_model_len=131072)


def key_of(case: Case) -> str:
    """The beginning of the case's row of the table."""
    return (
        f"| {case.topology} | {case.model} | {case.dtype} | {case.num_tokens} | {case.num_rows} | {case.page_size} | "
        f"{case.max_model_len} |"
    )


def row_of(result: Result) -> str:
    """The result as a row of the table."""
    if result.refusal is None:
        outcome = f"{result.temporary / 1e6:.1f} | {len(pool_copies(result))}"
    else:
        outcome = f"refused: {' '.join(result.refusal.split())[:300].replace('|', '/')} |"
    return f"{key_of(result.case)} {outcome} |"


def main() -> None:
    """Compile what is asked for, and put it into the document's table; its other rows stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", action="append", help="only this one; may be given several times")
    parser.add_argument("--pages", action="append", metavar="DTYPE", help="only pages of this type; likewise")
    parser.add_argument("--document", type=Path, default=Path("docs/tpu.md"))
    arguments = parser.parse_args()
    head, rest = arguments.document.read_text().split(START)
    old, tail = rest.split(END)
    lines = [
        "| topology | model | pages | tokens | rows | page size | context | temporaries, MB | pool copies |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        is_wanted = arguments.topology is None or case.topology in arguments.topology
        if is_wanted and (arguments.pages is None or case.dtype in arguments.pages):
            lines.append(row_of(compile_case(case)))
            print(lines[-1], flush=True)
        else:
            lines += [line for line in old.splitlines() if line.startswith(key_of(case))]
    arguments.document.write_text("\n".join([f"{head}{START}", "", *lines, "", f"{END}{tail}"]))


if __name__ == "__main__":
    main()
