"""Groups of layers that see equally far, and how many pages sequences need in them."""

import json
from pathlib import Path

import pytest

from models import find_architecture
from models.layer_groups import LayerGroups, Reach

CONFIGS = Path(__file__).parent / "configs"


def reaches_of(name):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    traits = find_architecture(config).Config.from_hf(config).layer_traits()
    return [Reach(trait.window) for trait in traits]


@pytest.mark.parametrize(
    ("name", "size", "windows"),
    [
        ("gemma-3-270m", 3, [0, 512, 512, 512, 512, 512]),
        ("gemma-3-1b", 4, [0, 512, 512, 512, 512, 512, 512]),
        ("gemma-2-2b", 13, [0, 4096]),
        ("gpt-oss-20b", 12, [0, 128]),
        ("command-r7b", 8, [0, 4096, 4096, 4096]),
        ("olmo-3-7b", 8, [0, 4096, 4096, 4096]),
        ("exaone-4.0-32b", 16, [0, 4096, 4096, 4096]),
        ("llama-3.1-8b", 32, [0]),
    ],
)
def test_groups_of_real_models(name, size, windows):
    groups = LayerGroups.arrange(reaches_of(name), max_model_len=32768)
    assert (groups.size, [reach.window for reach in groups.reaches]) == (size, windows)


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt-oss-20b", "olmo-3-7b"])
def test_every_layer_has_a_place_of_its_own_in_a_group_that_sees_as_far(name):
    layers = reaches_of(name)
    groups = LayerGroups.arrange(layers, max_model_len=32768)
    places = list(zip(groups.group_of, groups.index_of, strict=True))
    assert len(set(places)) == len(layers)
    for reach, (group, index) in zip(layers, places, strict=True):
        assert groups.reaches[group] == reach
        assert 0 <= index < groups.size


def test_a_window_that_no_sequence_leaves_is_none():
    layers = [Reach(window=8), Reach(), Reach(window=7)]
    assert LayerGroups.arrange(layers, max_model_len=8).reaches == (Reach(), Reach(), Reach(window=7))
    assert LayerGroups.arrange(layers[:2], max_model_len=8) == LayerGroups.whole(2)


def test_kinds_of_nearly_equal_number_make_a_group_each():
    layers = [Reach()] * 9 + [Reach(window=4)] * 8
    groups = LayerGroups.arrange(layers, max_model_len=100)
    assert (groups.size, groups.num_groups) == (9, 2)


def test_a_lone_odd_layer_does_not_make_a_table_of_every_other():
    layers = [Reach()] + [Reach(window=4)] * 20
    assert LayerGroups.arrange(layers, max_model_len=100) == LayerGroups.whole(21)


@pytest.mark.parametrize("reach", [Reach(window=1), Reach(window=5), Reach(window=12), Reach(chunk=12), Reach()])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("num_new", [1, 2, 7])
def test_no_more_pages_are_held_than_are_counted(reach, page_size, num_new):
    groups = LayerGroups((reach,), (0,), (0,), 1)
    for start in range(60):
        first = reach.first_seen(max(start - 1, 0)) // page_size
        for length in range(start + 1, start + num_new + 1):
            held = -(-length // page_size) - first
            assert held <= groups.pages_for(length, page_size, num_new)
