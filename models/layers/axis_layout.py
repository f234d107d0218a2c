"""Where the entries of a parameter's axis come from in a checkpoint: pieces dealt out, repeated, padded with zeros."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Block(NamedTuple):
    """Neighbouring entries of an axis that are neighbours in the checkpoint too, or a run of zeros."""

    source: int | None
    """Where the first is, among the checkpoint's parts laid end to end; None is zeros."""
    size: int


class Run(NamedTuple):
    """Part of a block, within one shard of the axis."""

    target: int
    """Where the first entry is in the shard."""
    source: int | None
    size: int


@dataclass(frozen=True)
class AxisLayout:
    """One axis, block by block."""

    parts: tuple[int, ...]
    """Sizes that the axis has in the checkpoint's tensors, one after another where several share it."""
    blocks: tuple[Block, ...]
    groups: int = 1
    """Into how many pieces a checkpoint has cut each part where it has dealt them out itself: see `dealt`."""

    @property
    def size(self) -> int:
        """Entries of the axis, padding included."""
        return sum(block.size for block in self.blocks)

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """What fills entries `start` to `stop`, in order."""
        ends = accumulate(block.size for block in self.blocks)
        for (source, size), end in zip(self.blocks, ends, strict=True):
            first, last = max(end - size, start), min(end, stop)
            if first < last:
                yield Run(first - start, None if source is None else source + first - (end - size), last - first)

    def within(self, stored: "AxisLayout") -> "AxisLayout":
        """The same entries, with their sources counted along an axis that is laid out as `stored` and has them all."""
        ends = accumulate(block.size for block in stored.blocks)
        pieces = [
            (source, source + size, end - size)
            for (source, size), end in zip(stored.blocks, ends, strict=True)
            if source is not None
        ]
        blocks: list[Block] = []
        for source, size in self.blocks:
            if source is None:
                blocks.append(Block(None, size))
                continue
            overlaps = ((max(first, source), min(last, source + size), first, at) for first, last, at in sorted(pieces))
            found = [Block(at + low - first, high - low) for low, high, first, at in overlaps if low < high]
            assert sum(block.size for block in found) == size, f"{source} to {source + size} is not all there"
            blocks += found
        return AxisLayout((stored.size,), tuple(merged(blocks)))

    def dealt(self) -> "AxisLayout":
        """The layout for one tensor that has the first piece of each part, then the second of each, and so on.

        No block may reach beyond a piece.
        """
        starts = [0, *accumulate(self.parts)]

        def moved(block: Block) -> Block:
            if block.source is None:
                return block
            part = next(i for i, end in enumerate(starts[1:]) if block.source < end)
            group, within = divmod(block.source - starts[part], self.parts[part] // self.groups)
            return Block((group * starts[-1] + starts[part]) // self.groups + within, block.size)

        return AxisLayout((starts[-1],), tuple(map(moved, self.blocks)))


def as_stored(size: int) -> AxisLayout:
    """An axis that is as the checkpoint has it."""
    return AxisLayout((size,), (Block(0, size),))


def padded(size: int, multiple: int) -> AxisLayout | None:
    """An axis filled up with zeros to a multiple; None if it is one."""
    missing = -size % multiple
    return AxisLayout((size,), (Block(0, size), Block(None, missing))) if missing else None


def picked(sources: Iterable[int | None], count: int, unit: int = 1) -> AxisLayout | None:
    """Of `count` pieces of `unit` entries each, the ones named, zeros for None; None if that changes nothing."""
    blocks = tuple(merged(Block(None if source is None else source * unit, unit) for source in sources))
    return None if blocks == (Block(0, count * unit),) else AxisLayout((count * unit,), blocks)


def merged(blocks: Iterable[Block]) -> list[Block]:
    """The blocks with neighbours joined."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        follows = last is not None and (
            block.source is None if last.source is None else block.source == last.source + last.size
        )
        if last is not None and follows:
            joined[-1] = Block(last.source, last.size + block.size)
        else:
            joined.append(block)
    return joined
