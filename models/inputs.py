"""The contract between the engine and the models: the batch a model sees and the cache it attends through.

`paxserve/engine/batch.py` fills it on the host; every model reads it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from models.layer_groups import LayerGroups, Reach
from pallas_kernels.ragged_attention import ragged_attention
from pallas_kernels.ragged_paged_attention import kv_head_axis, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from sharding.mesh import TENSOR
from sharding.rules import partition_spec, pool_sharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The tokens of one step: T tokens of R rows, packed one row after another."""

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    """Position of each token in its sequence; 0 for padding."""
    token_types: Int32[Array, " T"] | None = None
    """Which of two texts each token is of (0 or 1), for encoders that read pairs; None is all 0."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a model needs cached: the shape of the KV pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    is_latent: bool = False
    """Keys alone are kept; values are the beginnings of them."""
    page_divides: int | None = None
    """A number of tokens that must be a whole number of pages."""
    reaches: tuple[Reach, ...] = ()
    """How far back each layer sees; empty if all layers see everything."""


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
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})
    """The devices whose tensor axis the pool's kv heads are spread over."""
    tables: Int32[Array, "groups R P"] | None = None
    """The page tables of all groups of layers, where there are several."""
    groups: LayerGroups | None = dataclasses.field(default=None, metadata={"static": True})
    """Which layer has which of the tables, and its place in the pages; None if all layers have the one in metadata."""

    def rows_of(self, layer: int | Int32[Array, ""]) -> AttentionMetadata:
        """The batch's rows with the page table of the layer's group."""
        if self.groups is None:
            return self.metadata
        assert self.tables is not None
        group = jnp.asarray(self.groups.group_of, jnp.int32)[layer]
        return self.metadata._replace(page_table=self.tables[group])

    def attend(
        self,
        layer: int | Int32[Array, ""],
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"] | None,
        *,
        scale: float,
        window: int | Int32[Array, ""] | None = None,
        softcap: float | None = None,
        sinks: Float[Array, " N"] | None = None,
        value_dim: int | None = None,
        rows: AttentionMetadata | None = None,
    ) -> tuple[Float[Array, "T N V"], Self]:
        """Write k and v into their pages, attend causally over each row's pages.

        `window` W lets a query at position p see positions (p - W, p]; None or 0 is no window.
        Without v, values are the first `value_dim` channels of keys. `rows` takes the place of `rows_of(layer)`.
        """
        rows = self.rows_of(layer) if rows is None else rows
        layer = jnp.asarray(layer if self.groups is None else jnp.asarray(self.groups.index_of)[layer], jnp.int32)
        # A constant window stays one: kernels leave out what it makes needless.
        constant = window if window is None or isinstance(window, int) else None
        traced = None if window is constant else window

        def attention(*arrays: Any) -> Any:
            q, k, v, pool, layer, metadata, sinks, traced = arrays
            own = constant if traced is None else traced
            return ragged_paged_attention(
                q, k, v, pool, layer, metadata,
                scale=scale, window=own, softcap=softcap, sinks=sinks, value_dim=value_dim, backend=self.backend,
            )  # fmt: skip

        if self.mesh is not None and self.mesh.shape[TENSOR] > 1:
            attention = self._on_each_shard(attention, self.mesh, is_latent=v is None)
        out, pool = attention(q, k, v, self.pool, layer, rows, sinks, traced)
        return out, dataclasses.replace(self, pool=pool)

    def _on_each_shard(self, attention: Callable[..., Any], mesh: Mesh, *, is_latent: bool) -> Callable[..., Any]:
        """The same attention, each device with its own kv heads and their query heads: kernels know of no mesh.

        Latents are one kv head for all query heads: every device has them all.
        """
        heads, sinks, everywhere = partition_spec((None, "heads")), partition_spec(("heads",)), PartitionSpec()
        kv_heads = everywhere if is_latent else heads
        pool = everywhere if is_latent else pool_sharding(mesh, kv_head_axis(self.backend)).spec
        return jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(heads, kv_heads, kv_heads, pool, everywhere, everywhere, sinks, everywhere),
            out_specs=(heads, pool),
            check_vma=False,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WholePrompts:
    """In the place of a cache where every row of the batch is whole: tokens attend to their row, nothing is kept."""

    cu_lens: Int32[Array, " R+1"]
    """Where each row starts; tokens from the last entry on are padding."""
    is_causal: bool = dataclasses.field(metadata={"static": True})
    expert_backend: str = dataclasses.field(default="ragged", metadata={"static": True})
    """How the products of mixture-of-experts layers are computed: see `pallas_kernels.grouped_matmul`."""
    pool: Any = ()

    @property
    def mesh(self) -> Mesh | None:
        """None: models that are run for vectors have one device."""
        return None

    @property
    def metadata(self) -> AttentionMetadata:
        """The rows as layers other than attention see them: there are no pages."""
        lengths = self.cu_lens[1:] - self.cu_lens[:-1]
        return AttentionMetadata(self.cu_lens, lengths, jnp.zeros((lengths.shape[0], 0), jnp.int32), jnp.int32(0))

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
        """Attend within each row, and forwards too unless causal.

        A `window` W lets tokens see others less than W away; None or 0 is no window.
        """
        out = ragged_attention(
            q, k, v, self.cu_lens, scale=scale, is_causal=self.is_causal, window=window, softcap=softcap, sinks=sinks
        )
        return out, self
