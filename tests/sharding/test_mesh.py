import jax
import pytest

from sharding.mesh import AXES, make_mesh
from sharding.topology import describe


def test_mesh_has_every_axis_and_takes_the_first_devices():
    mesh = make_mesh(jax.devices(), tensor=4, data=2)
    assert mesh.axis_names == AXES == ("data", "expert", "tensor")
    assert dict(mesh.shape) == {"data": 2, "expert": 1, "tensor": 4}
    assert list(mesh.devices.flat) == jax.devices()
    assert list(make_mesh(jax.devices(), tensor=2).devices.flat) == jax.devices()[:2]
    assert make_mesh(jax.devices()).size == 1


def test_impossible_meshes():
    with pytest.raises(ValueError, match=r"data 1, expert 3, tensor 4 takes 12 devices, there are 8"):
        make_mesh(jax.devices(), tensor=4, expert=3)
    with pytest.raises(ValueError, match=r"tensor axis must be at least 1 long, got 0"):
        make_mesh(jax.devices(), tensor=0)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", ["v6e:2x2", "v6e:2x4", "v5e:4x4", "v5p:2x2x1", "tpu7x:2x2x1"])
def test_devices_of_a_described_slice(name):
    pytest.importorskip("libtpu", reason="libtpu is how a TPU is described without one: pip install libtpu")
    devices = describe(name).devices
    assert set(make_mesh(devices, tensor=len(devices)).devices.flat) == set(devices)
    assert set(make_mesh(devices, tensor=2).devices.flat) <= set(devices[:2])
    # Part of a slice that is no rectangle.
    assert make_mesh(devices, tensor=3).size == 3


@pytest.mark.tpu_aot
def test_neighbours_on_the_tensor_axis_are_linked():
    pytest.importorskip("libtpu", reason="libtpu is how a TPU is described without one: pip install libtpu")
    chips = [device.coords for device in make_mesh(describe("v6e:2x2").devices, tensor=4).devices.flat]
    for here, there in zip(chips, [*chips[1:], chips[0]], strict=True):
        assert sum(abs(a - b) for a, b in zip(here, there, strict=True)) == 1
