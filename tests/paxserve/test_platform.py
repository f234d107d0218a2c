"""What the engine makes of the machine: libtpu is left alone where there is no TPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

START = """
from paxserve.config import CompileConfig
from paxserve.platform import configure_jax
configure_jax(CompileConfig())
import jax
print(jax.config.jax_platforms, jax.default_backend())
"""


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="jax has plugins for other devices")
@pytest.mark.parametrize(("wanted", "seen"), [(None, "cpu cpu"), ("cpu", "cpu cpu")])
def test_libtpu_without_a_tpu_is_not_tried(wanted, seen):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    if wanted is not None:
        environment["JAX_PLATFORMS"] = wanted
    run = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=True)
    assert (run.stdout.strip(), run.stderr) == (seen, "")
