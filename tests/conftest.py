"""CPU with 8 simulated devices, no implicit rank promotion anywhere, and a Ctrl-C that works."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, which some send to themselves."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
