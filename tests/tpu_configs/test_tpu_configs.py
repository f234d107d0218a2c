import importlib.resources
import math
import tomllib

import pytest

from sharding.topology import CHIPS, GIB

FILES = sorted(path for path in importlib.resources.files("tpu_configs").iterdir() if path.name.endswith(".toml"))


def test_the_folder_holds_slices_of_every_current_generation():
    generations = {path.name.split("-")[0] for path in FILES}
    assert generations == {"v5e", "v5p", "v6e", "tpu7x"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_slice_agrees_with_its_topology(path):
    config = tomllib.loads(path.read_text())
    generation, shape = config["topology"].split(":")
    chip = CHIPS[generation]
    assert path.name == f"{generation}-{config['num_chips']}.toml"
    assert config["num_chips"] == math.prod(int(size) for size in shape.split("x"))
    assert config["num_devices"] == config["num_chips"] * chip.devices_per_chip
    assert config["num_chips"] % config["num_hosts"] == 0
    assert int(config["hbm_gib_per_device"] * GIB) == chip.hbm_bytes
    assert math.prod(config["mesh"].values()) == config["num_devices"]
