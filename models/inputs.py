"""The contract between the engine and the models: the batch a model sees and the cache it attends through.

`paxserve/engine/batch.py` fills it on the host; every model reads it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The tokens of one step: T tokens of R rows, packed one row after another."""

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    """Position of each token in its sequence; 0 for padding."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a model needs cached: the shape of the KV pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_divides: int | None = None
    """A number of tokens that must be a whole number of pages."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKVCache:
    """The KV pool together with this step's view of it; `attend` returns the updated cache."""

    pool: Any
    """Owned by the attention backend: see `pallas_kernels.ragged_paged_attention.make_pool`."""
    metadata: AttentionMetadata
    backend: str = dataclasses.field(metadata={"static": True})
    expert_backend: str = dataclasses.field(default="ragged", metadata={"static": True})
    """How the products of mixture-of-experts layers are computed: see `pallas_kernels.grouped_matmul`."""
    page_size: int = dataclasses.field(default=1, metadata={"static": True})
    """Tokens of a page."""

    def attend(
        self,
        layer: int | Int32[Array, ""],
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        *,
        scale: float,
        window: int | Int32[Array, ""] | None = None,
        softcap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "T N H"], Self]:
        """Write k and v into their pages, attend causally over each row's pages.

        `window` W lets a query at position p see positions (p - W, p]; None or 0 is no window.
        """
        out, pool = ragged_paged_attention(
            q, k, v, self.pool, layer, self.metadata,
            scale=scale, window=window, softcap=softcap, sinks=sinks, backend=self.backend,
        )  # fmt: skip
        return out, dataclasses.replace(self, pool=pool)
