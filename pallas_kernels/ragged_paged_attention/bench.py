"""How long the attention of a whole step takes, all layers in one program, over batches that matter.

Run as `python -m pallas_kernels.ragged_paged_attention.bench --help`; docs/attention-cpu.md explains the columns.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.ragged_paged_attention import AttentionMetadata, backends, make_pool, ragged_paged_attention

CASES: dict[str, list[tuple[int, int]]] = {
    "decode 1 row, 128": [(1, 128)],
    "decode 1 row, 250": [(1, 250)],
    "decode 1 row, 600": [(1, 600)],
    "decode 4 rows": [(1, n) for n in (150, 300, 450, 600)],
    "decode 16 rows": [(1, 128 + 31 * i) for i in range(16)],
    "decode 64 rows": [(1, 128 + 7 * i) for i in range(64)],
    "prefill 512": [(512, 512)],
    "prefill 512 of 1000": [(512, 1000)],
    "prefill 8 x 64": [(64, 64)] * 8,
    "mixed 32 rows, 480 prefill": [(1, 128 + 14 * i) for i in range(32)] + [(200, 200), (280, 560)],
}
"""Rows of each batch as (query tokens, cached tokens)."""


def make_metadata(rows: list[tuple[int, int]], num_pages: int, page_size: int, max_model_len: int) -> AttentionMetadata:
    """The batch's rows over randomly placed pages."""
    pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    table = np.zeros((len(rows), max_model_len // page_size), np.int32)
    used = 0
    for row, (_, kv_len) in enumerate(rows):
        needed = -(-kv_len // page_size)
        table[row, :needed] = pages[used : used + needed]
        used += needed
    if used > num_pages:
        raise ValueError(f"--pages must be at least {used} for this case, got {num_pages}.")
    cu_q_lens = np.cumsum([0] + [q_len for q_len, _ in rows], dtype=np.int32)
    kv_lens = np.array([kv_len for _, kv_len in rows], np.int32)
    num_decode_rows = np.int32(sum(q_len == 1 for q_len, _ in rows))
    return AttentionMetadata(*map(jnp.asarray, (cu_q_lens, kv_lens, table, num_decode_rows)))


def make_step(args: argparse.Namespace) -> Callable[..., tuple[Array, Array]]:
    """One step: every layer's attention fed by the one before it, in a loop or one after another."""

    def step(
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        pool: Array,
        metadata: AttentionMetadata,
    ) -> tuple[Array, Array]:
        def attend(carry: tuple[Array, Array], layer: int | Array) -> tuple[tuple[Array, Array], None]:
            out, pool = carry
            # As in a model: were k and v there before the last layer has read the pool, XLA would copy it.
            new = 0.1 * out[:, : args.kv_heads]
            scale = args.head_dim**-0.5
            return ragged_paged_attention(
                q + 0.5 * out, k + new, v + new, pool, layer, metadata, scale=scale, backend=args.backend
            ), None

        if not args.unrolled:
            return jax.lax.scan(attend, (q, pool), jnp.arange(args.layers))[0]
        carry = (q, pool)
        for layer in range(args.layers):
            carry, _ = attend(carry, layer)
        return carry

    return step


def measure(name: str, pool: Array, args: argparse.Namespace) -> Array:
    """Print the case's figures; the pool comes back because the step takes it."""
    rows = CASES[name]
    metadata = make_metadata(rows, args.pages, args.page_size, args.max_model_len)
    num_tokens = sum(q_len for q_len, _ in rows)
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (args.heads, args.kv_heads, args.kv_heads)
    q, k, v = (jax.random.normal(x, (num_tokens, n, args.head_dim)) for x, n in zip(keys, heads, strict=True))
    started = time.perf_counter()
    compiled = jax.jit(make_step(args), donate_argnums=3).lower(q, k, v, pool, metadata).compile()
    seconds = time.perf_counter() - started
    times = []
    for _ in range(args.repeats + 1):
        started = time.perf_counter()
        out, pool = compiled(q, k, v, pool, metadata)
        out.block_until_ready()
        times.append(1e3 * (time.perf_counter() - started))
    best, median = min(times[1:]), statistics.median(times[1:])
    gigabytes = (
        jnp.dtype(args.dtype).itemsize / 1e9 * sum(n for _, n in rows) * 2 * args.kv_heads * args.head_dim * args.layers
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    temporary = memory.temp_size_in_bytes / 2**20
    print(
        f"{name:28} median {median:8.2f} ms  best {best:8.2f} ms  {gigabytes / best * 1e3:5.1f} GB/s of KV  "
        f"compiled in {seconds:5.1f} s  {temporary:6.1f} MiB temporary",
        flush=True,
    )
    return pool


def main() -> None:
    """Measure the cases whose name contains one of the given words."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("words", nargs="*", help="parts of case names; all cases by default: " + ", ".join(CASES))
    parser.add_argument("--backend", default="xla", choices=backends())
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--pages", type=int, default=1820, help="pages of the pool")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--dtype", default="float32", help="of the pool")
    parser.add_argument("--unrolled", action="store_true", help="one copy of the layer after another, not a loop")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    pool = make_pool(
        args.backend, num_layers=args.layers, num_pages=args.pages, page_size=args.page_size,
        num_kv_heads=args.kv_heads, head_dim=args.head_dim, dtype=args.dtype,
    )  # fmt: skip
    pool = jax.tree.map(lambda x: x + jnp.asarray(1, x.dtype), pool)  # zeros may share one page of memory
    for name in CASES:
        if not args.words or any(word in name for word in args.words):
            pool = measure(name, pool, args)


if __name__ == "__main__":
    main()
