"""CPU with 8 simulated devices, no implicit rank promotion anywhere, and a Ctrl-C that works."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

PLENTY = 3 * 2**30
"""Bytes of resident memory from which on the programs of the file before are thrown away."""

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, which some send to themselves."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory() -> Iterator[None]:
    """Hundreds of files in one process: what they compiled would add up to many gigabytes."""
    yield
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > PLENTY:
        jax.clear_caches()
