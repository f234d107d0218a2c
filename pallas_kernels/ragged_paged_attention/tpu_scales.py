"""The scales of quantised pages in a TPU kernel: put beside a block's tokens, joined by new ones, written home.

A page's scales are `[rows, lanes]`, a token in each lane, since that is how they meet logits and probabilities. They
are rewritten a page at a time: unlike a page's rows, they share tiles.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.ragged_paged_attention.tpu_tuning import LANES, Shape, round_up
from pallas_kernels.ragged_paged_attention.tpu_write import Chunk, Walk


def pad_new_scales(scales: Float[Array, "T rows"], shape: Shape) -> Float[Array, "rows padded"]:
    """New tokens' scales in lanes, with room for pages that begin before the first token or end after the last."""
    lanes = shape.scale_lanes
    tail = lanes + LANES + -scales.shape[0] % LANES
    return jnp.pad(scales.T, ((0, 0), (lanes, tail)))


def scratch_shapes(shape: Shape) -> list[Any]:
    """What `ScaleWriter` needs: new scales, the pages' to merge them into, and their semaphores, all double."""
    rows, lanes = shape.scale_rows, shape.scale_lanes
    return [
        pltpu.VMEM((2, rows, lanes + LANES), jnp.float32),
        pltpu.VMEM((2, rows, lanes), jnp.float32),
        pltpu.SemaphoreType.DMA((3, 2)),
    ]


def spread(scale_slots_ref: Any, slot: Any, first_page: Any, num_tokens: Any, shape: Shape, block_ref: Any) -> None:
    """Fill `block_ref`, `[rows, S]`, with the scales of a slot's tokens from a page on; 0 past `num_tokens`.

    What no token owns may be NaN, and would meet a probability of 0.
    """
    size, block = shape.page_size, block_ref.shape[1]
    for page in range(block // size):
        block_ref[:, page * size : (page + 1) * size] = scale_slots_ref[slot, first_page + page, :, :size]
    lane = lax.broadcasted_iota(jnp.int32, block_ref.shape, 1)
    block_ref[...] = jnp.where(lane < num_tokens, block_ref[...], 0.0)


def of_head(block_ref: Any, head: Any) -> tuple[Float[Array, "1 S"], Float[Array, "1 S"]]:
    """A kv head's key and value scales of the block."""
    return block_ref[pl.ds(2 * head, 1), :], block_ref[pl.ds(2 * head + 1, 1), :]


def joined(page: Float[Array, "rows lanes"], token: Any, new: Float[Array, "rows 128"]) -> Float[Array, "rows lanes"]:
    """A page's scales with those of a new token, which `new` has in every lane."""
    lane = lax.broadcasted_iota(jnp.int32, page.shape, 1)
    return jnp.where(lane == token, jnp.tile(new, (1, page.shape[1] // LANES)), page)


class ScaleWriter(NamedTuple):
    """Writes the scales of the tokens that `TokenWriter` writes; a chunk is a page."""

    walk: Walk
    new_ref: Any  # [rows, padded] in HBM
    scales_ref: Any  # [L, pages, rows, lanes] in HBM
    layer: Any
    new_vmem: Any  # [2, rows, lanes + 128]
    pages_vmem: Any  # [2, rows, lanes]
    sems: Any  # [3, 2]

    def start(self, chunk: Chunk, slot: Any) -> None:
        """Start fetching the page's new scales and, if some stay, its old ones."""
        aligned = pl.multiple_of(self._token(chunk) // LANES * LANES, LANES)
        new = self.new_ref.at[:, pl.ds(aligned, self.new_vmem.shape[2])]
        pltpu.make_async_copy(new, self.new_vmem.at[slot], self.sems.at[0, slot]).start()

        @pl.when(self.walk.num_old(chunk) > 0)
        def _() -> None:
            pltpu.make_async_copy(self._page(chunk), self.pages_vmem.at[slot], self.sems.at[1, slot]).start()

    def finish(self, chunk: Chunk, slot: Any) -> None:
        """Put the new scales behind those that stay, and start their way home."""
        num_old = self.walk.num_old(chunk)
        new_vmem, pages_vmem = self.new_vmem, self.pages_vmem
        pltpu.make_async_copy(new_vmem.at[slot], new_vmem.at[slot], self.sems.at[0, slot]).wait()
        pl.when(num_old > 0)(lambda: self._wait(1, slot))
        width, lanes = new_vmem.shape[2], pages_vmem.shape[2]
        turn = width - lax.rem(self._token(chunk), LANES)
        new = pltpu.roll(new_vmem[slot], turn, axis=1)[:, :lanes]
        lane = lax.broadcasted_iota(jnp.int32, new.shape, 1)
        new = jnp.where(lane < self.walk.num_tokens(chunk), new, 0.0)
        pages_vmem[slot] = jnp.where(lane < num_old, pages_vmem[slot], new)
        pltpu.make_async_copy(pages_vmem.at[slot], self._page(chunk), self.sems.at[2, slot]).start()

    def wait(self, slot: Any) -> None:
        """Wait until the slot's scales have landed."""
        self._wait(2, slot)

    def _token(self, chunk: Chunk) -> Any:
        """The place in the padded array of new scales of what lands on the page's first lane."""
        return self.walk.token(chunk) + round_up(self.walk.size, LANES)

    def _page(self, chunk: Chunk) -> Any:
        page, _ = self.walk.place(chunk, self.walk.size)
        return self.scales_ref.at[self.layer, page]

    def _wait(self, kind: int, slot: Any) -> None:
        page = self.pages_vmem.at[slot]
        pltpu.make_async_copy(page, page, self.sems.at[kind, slot]).wait()
