"""How far back layers see, and which of them share the pages of a KV pool because they see equally far."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

MOST_GROUPS = 16
"""Page tables that a request may have: a model that would need more keeps everything in one."""

NEARLY_EQUAL = 1.25
"""Kinds of layers whose numbers differ by less than this factor make one group each, the smaller ones padded."""


class Reach(NamedTuple):
    """Which tokens up to its own position a layer's query sees: by default all."""

    window: int = 0
    """The last so many, its own included."""
    chunk: int = 0
    """Those of its own chunk, where chunks of so many tokens follow each other."""

    @property
    def is_limited(self) -> bool:
        """Whether anything goes out of sight."""
        return self.window > 0 or self.chunk > 0

    def first_seen(self, position: int) -> int:
        """The first position that a query at `position` sees; it never decreases."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0

    def most_held(self, num_tokens: int, num_new: int) -> int:
        """Most tokens that a sequence of up to `num_tokens` has in sight at once when it grows by up to `num_new`.

        The token before the new ones counts as one that may be computed once more.
        """
        return min(num_tokens, (self.window or self.chunk) + num_new) if self.is_limited else num_tokens


@dataclass(frozen=True)
class LayerGroups:
    """Layers in groups of one size, each group with its own page table.

    A page belongs to one group and holds the keys and values of its layers, so that all pages are alike and one pool
    serves all groups, in whatever shares the requests at hand need.
    """

    reaches: tuple[Reach, ...]
    """Of each group."""
    group_of: tuple[int, ...]
    """Each layer's group."""
    index_of: tuple[int, ...]
    """Each layer's place in its group, and so in its pages."""
    size: int
    """Layers of a page; some places of a group may be nobody's."""

    @property
    def num_groups(self) -> int:
        """Page tables of a request."""
        return len(self.reaches)

    @classmethod
    def whole(cls, num_layers: int) -> Self:
        """One group of all layers, which keeps everything."""
        return cls((Reach(),), (0,) * num_layers, tuple(range(num_layers)), num_layers)

    @classmethod
    def arrange(cls, layers: Sequence[Reach], max_model_len: int) -> Self:
        """Groups for layers of these reaches, in sequences of up to `max_model_len` tokens.

        A group is as large as the rarest kind of layer is common: Gemma 3's 22 local and 4 global layers make six
        groups of 4 local ones (two places stay empty) and one of 4 global ones.
        """
        last = max_model_len - 1
        known = [reach if reach.first_seen(last) > 0 else Reach() for reach in layers]
        # What sees everything comes first: its pages say how far a prefix is known at all.
        kinds = sorted(dict.fromkeys(known), key=lambda reach: reach.is_limited)
        counts = {kind: known.count(kind) for kind in kinds}
        size = min(counts.values())
        if max(counts.values()) < NEARLY_EQUAL * size:
            size = max(counts.values())
        num_groups = {kind: -(-count // size) for kind, count in counts.items()}
        if sum(num_groups.values()) > MOST_GROUPS:
            return cls.whole(len(layers))
        firsts = {kind: sum(num_groups[k] for k in kinds[:i]) for i, kind in enumerate(kinds)}
        ranks = [known[:i].count(kind) for i, kind in enumerate(known)]
        return cls(
            reaches=tuple(kind for kind in kinds for _ in range(num_groups[kind])),
            group_of=tuple(firsts[kind] + rank // size for kind, rank in zip(known, ranks, strict=True)),
            index_of=tuple(rank % size for rank in ranks),
            size=size,
        )

    def pages_for(self, num_tokens: int, page_size: int, num_new: int) -> int:
        """Most pages, over all groups, of a sequence that grows to `num_tokens` by up to `num_new` tokens a step."""
        return pages_for(self.reaches, num_tokens, page_size, num_new)


def pages_for(reaches: Sequence[Reach], num_tokens: int, page_size: int, num_new: int) -> int:
    """Most pages, over all groups of these reaches, of a sequence of `num_tokens` that grows by up to `num_new`."""
    total = 0
    for reach in reaches:
        held = reach.most_held(num_tokens, num_new)
        # What is in sight need not begin with a page.
        total += min(-(-held // page_size) + (held < num_tokens), -(-num_tokens // page_size))
    return total
