"""The one mesh that a model is spread over, with an axis for each way of spreading it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

DATA, EXPERT, TENSOR = "data", "expert", "tensor"

AXES = (DATA, EXPERT, TENSOR)
"""Outermost first: neighbouring devices, whose links are the fastest, share the tensor axis."""


def make_mesh(devices: Sequence[Any], *, tensor: int = 1, expert: int = 1, data: int = 1) -> Mesh:
    """A mesh of the first `data * expert * tensor` devices: real ones, or those of a described topology.

    Its axes are of the kind that the compiler completes (`Auto`): weights and the KV pool are annotated, and what
    follows from them is left to it. Raises `ValueError` when a size is below 1 or there are too few devices.
    """
    shape = (data, expert, tensor)
    for name, size in zip(AXES, shape, strict=True):
        if size < 1:
            raise ValueError(f"the mesh's {name} axis must be at least 1 long, got {size}.")
    count = math.prod(shape)
    if count > len(devices):
        sizes = ", ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(f"a mesh of {sizes} takes {count} devices, there are {len(devices)}.")
    return Mesh(_arrange(list(devices[:count]), shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The devices in the mesh's shape, along the links of a slice where they are known to fill a rectangle of it."""
    if hasattr(devices[0], "coords"):
        try:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except (AssertionError, NotImplementedError, ValueError):
            pass  # an odd part of a slice: any order is as good
    return np.array(devices).reshape(shape)
