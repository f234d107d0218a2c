import numpy as np
import pytest

from models.layers.axis_layout import AxisLayout, Block, Run, as_stored, padded, picked


def filled(layout: AxisLayout, source: np.ndarray, start: int = 0, stop: int | None = None) -> list[int]:
    """The axis, or a part of it, put together run by run; zeros are -1."""
    stop = layout.size if stop is None else stop
    axis = np.full(stop - start, -1)
    for run in layout.runs(start, stop):
        if run.source is not None:
            axis[run.target : run.target + run.size] = source[run.source : run.source + run.size]
    return axis.tolist()


def test_padding():
    layout = padded(5, 4)
    assert layout is not None
    assert layout.size == 8
    assert filled(layout, np.arange(5)) == [0, 1, 2, 3, 4, -1, -1, -1]
    assert padded(8, 4) is None
    assert padded(8, 1) is None


def test_pieces_picked_repeated_and_left_out():
    layout = picked([1, 1, None, 0], 2, unit=2)
    assert layout is not None
    assert layout.parts == (4,)
    assert filled(layout, np.arange(4)) == [2, 3, 2, 3, -1, -1, 0, 1]
    assert picked([0, 1, 2], 3) is None


def test_runs_of_a_part_join_to_the_whole():
    layout = AxisLayout((10,), (Block(6, 4), Block(None, 2), Block(0, 5)))
    whole = filled(layout, np.arange(10))
    for cut in range(layout.size + 1):
        assert filled(layout, np.arange(10), 0, cut) + filled(layout, np.arange(10), cut) == whole
    assert list(layout.runs(2, 5)) == [Run(0, 8, 2), Run(2, None, 1)]
    assert list(layout.runs(3, 3)) == []


@pytest.mark.parametrize(
    "blocks",
    [
        (Block(0, 2), Block(4, 1), Block(6, 1), Block(2, 2), Block(5, 1), Block(7, 1)),
        (Block(3, 1), Block(None, 2), Block(6, 1), Block(2, 2), Block(2, 2)),
    ],
)
def test_a_checkpoint_that_has_dealt_out_its_parts(blocks):
    """Parts of 4, 2 and 2 in two groups: a tensor that has 2, 1 and 1 entries of each, twice."""
    layout = AxisLayout((4, 2, 2), blocks, groups=2)
    assert layout.dealt().parts == (8,)
    assert filled(layout.dealt(), np.array([0, 1, 4, 6, 2, 3, 5, 7])) == filled(layout, np.arange(8))


def test_as_stored():
    assert filled(as_stored(3), np.arange(3)) == [0, 1, 2]


def test_sources_counted_along_another_axis():
    # Stored: the checkpoint's halves dealt out by twos; wanted: the second half, padding, the first half twice.
    stored = AxisLayout((4, 4), (Block(0, 2), Block(4, 2), Block(2, 2), Block(6, 2)))
    wanted = AxisLayout((4, 4), (Block(4, 4), Block(None, 1), Block(0, 4), Block(1, 2)))
    entries = list("abcdefgh")
    kept = [entries[block.source + i] for block in stored.blocks for i in range(block.size)]
    found = [
        None if run.source is None else kept[run.source + i]
        for run in wanted.within(stored).runs(0, wanted.size)
        for i in range(run.size)
    ]
    assert found == [*"efgh", None, *"abcd", *"bc"]
