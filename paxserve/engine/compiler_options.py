"""What XLA is told beyond the program, by kind of device."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

logger = logging.getLogger(__name__)

COMPILER_OPTIONS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    # By default 16-bit operands of a loop get tiles of 16 rows. Arguments have tiles of 8, so that every run of a
    # program would first copy the stacked weights of all layers into other tiles: docs/tpu.md has the figures.
    {"TPU7x": MappingProxyType({"xla_tpu_control_large_2nd_minor_layout_for_x16": False})}
)
"""Options by device kind, as JAX spells it; other kinds need none."""


def compile_lowered(lowered: Any, device_kind: str) -> Any:
    """The compiled program, with the device kind's options where this compiler has them."""
    options = dict(COMPILER_OPTIONS.get(device_kind, {}))
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if not options or "No such compile option" not in str(error):
            raise
        logger.warning("This compiler does not have an option that %s is compiled with: %s", device_kind, error)
        return lowered.compile()
