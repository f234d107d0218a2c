from itertools import product

import pytest

from models.layers.head_layout import HeadLayout

SIZES = [(4, 2), (4, 4), (4, 1), (9, 3), (8, 8), (12, 2), (64, 8), (6, 6), (71, 1)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SIZES)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 8, 16])
def test_every_head_is_computed_once_beside_its_keys(num_heads, num_kv_heads, shards):
    layout = HeadLayout(num_heads, num_kv_heads, shards)
    kv_heads, heads = layout.kv_sources(), layout.head_sources()
    assert len(kv_heads) == layout.num_spread_kv_heads
    assert len(heads) == layout.num_spread_heads
    assert sorted(head for head in heads if head is not None) == list(range(num_heads))
    assert len(kv_heads) == shards * -(-num_kv_heads // shards)  # the least there is
    for place, head in enumerate(heads):
        if head is not None:
            assert kv_heads[place // layout.group] == head // (num_heads // num_kv_heads)
    copies = [kv_heads.count(head) for head in range(num_kv_heads)]
    assert copies == [layout.copies] * num_kv_heads


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "shards", "heads", "kv_heads"),
    [
        (8, 2, 2, [0, 1, 2, 3, 4, 5, 6, 7], [0, 1]),
        (4, 2, 4, [0, 1, 2, 3], [0, 0, 1, 1]),
        (3, 1, 2, [0, 1, 2, None], [0, 0]),
        (4, 1, 8, [0, 1, 2, 3, None, None, None, None], [0] * 8),
        (9, 3, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8, None, None, None], [0, 1, 2, None]),
    ],
)
def test_examples(num_heads, num_kv_heads, shards, heads, kv_heads):
    layout = HeadLayout(num_heads, num_kv_heads, shards)
    assert layout.head_sources() == heads
    assert layout.kv_sources() == kv_heads


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), SIZES)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_columns_of_q_k_and_v(num_heads, num_kv_heads, shards):
    layout = HeadLayout(num_heads, num_kv_heads, shards)
    columns = layout.qkv_layout(2)
    first_key, first_value = 2 * num_heads, 2 * (num_heads + num_kv_heads)
    expected = []
    heads = iter(layout.head_sources())
    for kv_head in layout.kv_sources():
        starts = [None if (head := next(heads)) is None else 2 * head for _ in range(layout.group)]
        starts += [None if kv_head is None else first + 2 * kv_head for first in (first_key, first_value)]
        expected += [None if start is None else start + i for start, i in product(starts, range(2))]
    found = [None if b.source is None else b.source + i for b in columns.blocks for i in range(b.size)]
    assert found == expected
    assert columns.parts == (2 * num_heads, 2 * num_kv_heads, 2 * num_kv_heads)
    assert columns.size == 2 * (layout.num_spread_heads + 2 * layout.num_spread_kv_heads)
