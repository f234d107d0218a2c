import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from sharding.topology import CHIPS, chip_facts, describe

LIBTPU = "libtpu is how a TPU is described without one: pip install libtpu"


def test_facts_by_device_kind():
    assert chip_facts("TPU v6 lite").generation == "v6e"
    with pytest.raises(ValueError, match=r"'NVIDIA H200'; known are TPU v4"):
        chip_facts("NVIDIA H200")


@pytest.mark.parametrize("name", ["v6e", "h100:8", "v6e:8", "v6e:2x", "tpu7:2x2x1", ""])
def test_refuses_names_that_name_nothing(name):
    with pytest.raises(ValueError, match="a topology is named generation:shape"):
        describe(name)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("name", "devices", "chips", "hosts"),
    [
        ("v4:2x2x1", 8, 4, 1), ("v5e:1x1", 1, 1, 1), ("v5e:4x4", 16, 16, 4), ("v5p:2x2x1", 4, 4, 1),
        ("v6e:1x1", 1, 1, 1), ("v6e:2x4", 8, 8, 2), ("tpu7x:2x2x1", 8, 4, 1),
    ],
)  # fmt: skip
def test_describes_slices(name, devices, chips, hosts):
    pytest.importorskip("libtpu", reason=LIBTPU)
    topology = describe(name)
    assert (topology.num_devices, topology.num_chips, topology.num_hosts) == (devices, chips, hosts)
    assert {device.device_kind for device in topology.devices} == {topology.chip.device_kind}


@pytest.mark.tpu_aot
def test_refuses_shapes_that_libtpu_refuses():
    pytest.importorskip("libtpu", reason=LIBTPU)
    with pytest.raises(ValueError, match="libtpu cannot describe 'v5e:3x3'"):
        describe("v5e:3x3")


@pytest.mark.tpu_aot
def test_meshes_are_cut_from_the_slice():
    pytest.importorskip("libtpu", reason=LIBTPU)
    topology = describe("v6e:2x4")
    assert dict(topology.mesh((2, 4), ("data", "tensor")).shape) == {"data": 2, "tensor": 4}
    assert topology.mesh((1,), ("tensor",)).size == 1
    with pytest.raises(ValueError, match=r"takes 16 devices, v6e:2x4 has 8"):
        topology.mesh((16,), ("tensor",))


@pytest.mark.tpu_aot
@pytest.mark.parametrize("generation", sorted(CHIPS))
def test_facts_agree_with_the_table_of_jax(generation):
    """Two tables of one thing: a slip in either shows; the bandwidth of v5p is where the two sources differ."""
    pytest.importorskip("libtpu", reason=LIBTPU)
    facts = CHIPS[generation]
    shape = "1x1" if generation in ("v5e", "v6e") else "2x2x1"
    with jax.set_mesh(describe(f"{generation}:{shape}").mesh((1,), ("tensor",))):
        info = pltpu.get_tpu_info()
    cores = info.num_cores
    assert (facts.vmem_bytes, facts.smem_bytes) == (info.vmem_capacity_bytes, info.smem_capacity_bytes)
    assert facts.bf16_flops == pytest.approx(cores * info.bf16_ops_per_second, rel=0.01)
    assert facts.hbm_bytes_per_second == pytest.approx(cores * info.mem_bw_bytes_per_second, rel=0.13)
    assert facts.hbm_bytes <= cores * info.hbm_capacity_bytes
