"""Options that programs are compiled with, by kind of device."""

import jax
import jax.numpy as jnp
import pytest

from paxserve.engine import compiler_options
from paxserve.engine.compiler_options import compile_lowered


@pytest.fixture
def lowered():
    return jax.jit(lambda x: jnp.sin(x) + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32))


def with_options(monkeypatch, **options):
    monkeypatch.setattr(compiler_options, "COMPILER_OPTIONS", {"cpu": options})


def test_options_reach_the_compiler(monkeypatch, lowered):
    with_options(monkeypatch, xla_backend_optimization_level="not a level")
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level"):
        compile_lowered(lowered, "cpu")
    compile_lowered(lowered, "another kind")


def test_an_option_that_this_compiler_lacks_is_left_out_and_said(monkeypatch, lowered, caplog):
    with_options(monkeypatch, xla_no_such_option=False)
    assert float(compile_lowered(lowered, "cpu")(jnp.zeros(8))[0]) == 1.0
    assert "xla_no_such_option" in caplog.text
