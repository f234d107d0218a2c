"""Which attention heads each of several devices computes, where their numbers do not divide."""

from dataclasses import dataclass

from models.layers.axis_layout import AxisLayout, Block, merged, picked


@dataclass(frozen=True)
class HeadLayout:
    """Query and kv heads spread evenly over shards, every query head on the shard of its kv head.

    With fewer kv heads than shards, each kv head is on several shards, which share out its query heads. Whatever does
    not divide then is padded with heads of zeros, which add nothing. So a shard's cache never holds more heads than
    `ceil(num_kv_heads / shards)`, the least there is.
    """

    num_heads: int
    num_kv_heads: int
    shards: int = 1

    @property
    def copies(self) -> int:
        """Shards that have a kv head."""
        return max(1, self.shards // self.num_kv_heads)

    @property
    def group(self) -> int:
        """Query heads of a kv head on one shard, padding included."""
        return -(-self._whole_group // self.copies)

    @property
    def num_spread_kv_heads(self) -> int:
        """Kv heads of all shards together, copies and padding included."""
        return -(-self.num_kv_heads * self.copies // self.shards) * self.shards

    @property
    def num_spread_heads(self) -> int:
        """Query heads of all shards together, padding included."""
        return self.num_spread_kv_heads * self.group

    def kv_sources(self) -> list[int | None]:
        """The checkpoint's head that each kv head is; None is padding."""
        heads = (place // self.copies for place in range(self.num_spread_kv_heads))
        return [head if head < self.num_kv_heads else None for head in heads]

    def head_sources(self) -> list[int | None]:
        """The checkpoint's head that each query head is; None is padding."""
        sources: list[int | None] = []
        for place, kv_head in enumerate(self.kv_sources()):
            first = place % self.copies * self.group
            for head in range(first, first + self.group):
                is_real = kv_head is not None and head < self._whole_group
                sources.append(kv_head * self._whole_group + head if is_real else None)  # type: ignore[operator]
        return sources

    def heads_layout(self, unit: int = 1) -> AxisLayout | None:
        """An axis with `unit` entries for each query head."""
        return picked(self.head_sources(), self.num_heads, unit)

    def kv_heads_layout(self, unit: int = 1) -> AxisLayout | None:
        """An axis with `unit` entries for each kv head."""
        return picked(self.kv_sources(), self.num_kv_heads, unit)

    def qkv_layout(self, head_dim: int) -> AxisLayout:
        """The joint axis of q, k and v: the columns of one kv head after another, its query heads first."""
        parts = (self.num_heads * head_dim, self.num_kv_heads * head_dim, self.num_kv_heads * head_dim)
        queries = [Block(None if head is None else head * head_dim, head_dim) for head in self.head_sources()]
        blocks: list[Block] = []
        for place, kv_head in enumerate(self.kv_sources()):
            blocks += merged(queries[place * self.group : (place + 1) * self.group])
            for first in (parts[0], parts[0] + parts[1]):
                blocks.append(Block(None if kv_head is None else first + kv_head * head_dim, head_dim))
        return AxisLayout(parts, tuple(blocks), groups=self.num_kv_heads)

    @property
    def _whole_group(self) -> int:
        return self.num_heads // self.num_kv_heads
