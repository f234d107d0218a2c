"""TPU slices that are not here: described topologies to compile for, and the facts of their chips.

Names are libtpu's, `generation:shape`, such as `v6e:2x4`. Facts are for one JAX device, which is a chip, except on
v4 and TPU7x, where each of a chip's two cores is a device of its own.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ChipFacts:
    """What one device of a TPU generation has; rates are peaks."""

    generation: str
    device_kind: str
    """What JAX calls the device."""
    devices_per_chip: int
    hbm_bytes: int
    """HBM that a program may use: the limit that the compiler enforces, below what is soldered on."""
    hbm_bytes_per_second: float
    vmem_bytes: int
    """VMEM of one core; a v5p device has two cores, each with as much."""
    smem_bytes: int
    clock_hz: float
    """Cycles a second. Not published: what `bf16_flops` come to with a device's matrix units (four of 128 x 128; v5p
    eight; v6e and TPU7x four of 256 x 256) and two operations a place and cycle."""
    bf16_flops: float
    int8_ops: float
    """0 where the matrix unit has no such mode: int8 weights are then widened first."""
    fp8_flops: float
    """0 where fp8 values are widened first."""
    ici_bytes_per_second: float
    """Interconnect bandwidth of one chip, one way, all its links together."""
    source: str
    """Where the rates come from. Usable HBM is what libtpu 0.0.52 enforces; VMEM and SMEM are what JAX's table says."""


CHIPS = {
    facts.generation: facts
    for facts in (
        ChipFacts(
            generation="v4", device_kind="TPU v4", devices_per_chip=2,
            hbm_bytes=int(15.25 * GIB), hbm_bytes_per_second=1.228e12 / 2, vmem_bytes=16 * MIB, smem_bytes=MIB,
            clock_hz=1.05e9, bf16_flops=275e12 / 2, int8_ops=275e12 / 2, fp8_flops=0, ici_bytes_per_second=300e9,
            source="https://docs.cloud.google.com/tpu/docs/v4",
        ),
        ChipFacts(
            generation="v5e", device_kind="TPU v5 lite", devices_per_chip=1,
            hbm_bytes=int(15.75 * GIB), hbm_bytes_per_second=819e9, vmem_bytes=128 * MIB, smem_bytes=MIB,
            clock_hz=1.5e9, bf16_flops=197e12, int8_ops=393e12, fp8_flops=0, ici_bytes_per_second=200e9,
            source="https://docs.cloud.google.com/tpu/docs/v5e",
        ),
        ChipFacts(
            generation="v5p", device_kind="TPU v5", devices_per_chip=1,
            hbm_bytes=int(95.73 * GIB), hbm_bytes_per_second=2765e9, vmem_bytes=64 * MIB, smem_bytes=MIB,
            clock_hz=1.75e9, bf16_flops=459e12, int8_ops=918e12, fp8_flops=0, ici_bytes_per_second=600e9,
            source="https://docs.cloud.google.com/tpu/docs/v5p",
        ),
        ChipFacts(
            generation="v6e", device_kind="TPU v6 lite", devices_per_chip=1,
            hbm_bytes=int(31.24 * GIB), hbm_bytes_per_second=1640e9, vmem_bytes=128 * MIB, smem_bytes=MIB,
            clock_hz=1.75e9, bf16_flops=918e12, int8_ops=1836e12, fp8_flops=918e12, ici_bytes_per_second=400e9,
            source="https://docs.cloud.google.com/tpu/docs/v6e",
        ),
        ChipFacts(
            generation="tpu7x", device_kind="TPU7x", devices_per_chip=2,
            hbm_bytes=int(94.74 * GIB), hbm_bytes_per_second=7380e9 / 2, vmem_bytes=64 * MIB, smem_bytes=MIB,
            clock_hz=2.2e9, bf16_flops=2307e12 / 2, int8_ops=0, fp8_flops=4614e12 / 2, ici_bytes_per_second=600e9,
            source="https://docs.cloud.google.com/tpu/docs/tpu7x",
        ),
    )
}  # fmt: skip
"""Facts by generation, as it is spelt in a topology's name."""


def chip_facts(device_kind: str) -> ChipFacts:
    """The facts of the devices that JAX calls `device_kind`."""
    for facts in CHIPS.values():
        if facts.device_kind == device_kind:
            return facts
    known = ", ".join(facts.device_kind for facts in CHIPS.values())
    raise ValueError(f"no facts are known of device kind {device_kind!r}; known are {known}.")


@dataclass(frozen=True)
class Topology:
    """A slice to compile for: its devices are descriptions, which compile but cannot run anything."""

    name: str
    chip: ChipFacts
    devices: tuple[Any, ...]

    @property
    def num_devices(self) -> int:
        """JAX devices of the slice."""
        return len(self.devices)

    @property
    def num_chips(self) -> int:
        """Chips of the slice, which is what is paid for."""
        return self.num_devices // self.chip.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Machines that the slice's devices hang on."""
        return len({device.process_index for device in self.devices})

    def mesh(self, shape: Sequence[int], axis_names: Sequence[str]) -> jax.sharding.Mesh:
        """A mesh of the slice's first devices, as many as `shape` takes."""
        size = int(np.prod(shape))
        if size > self.num_devices:
            raise ValueError(f"a mesh {tuple(shape)} takes {size} devices, {self.name} has {self.num_devices}.")
        return jax.sharding.Mesh(np.array(self.devices[:size]).reshape(tuple(shape)), tuple(axis_names))


def describe(name: str) -> Topology:
    """The slice called `name`, from libtpu's own description of it; ValueError when there is none."""
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+){1,2})", name)
    if match is None or match[1] not in CHIPS:
        raise ValueError(f"a topology is named generation:shape with one of {', '.join(CHIPS)}, got {name!r}.")
    # libtpu otherwise asks the cloud's metadata server what it runs on, and refuses a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Without these two it complains of missing hosts; what they say does not matter to a description.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-1")
    # A slice smaller than a host's usual four chips is one host; older libtpu wants to be told.
    sides = [int(side) for side in match[2].split("x")]
    bounds = [min(side, usual) for side, usual in zip([*sides, 1][:3], (2, 2, 1), strict=True)]
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=bounds)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError, ValueError) as error:
        raise ValueError(f"libtpu cannot describe {name!r} (pip install libtpu, if it is missing): {error}") from error
    return Topology(name, CHIPS[match[1]], tuple(description.devices))
