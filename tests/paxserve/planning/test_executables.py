"""Programs written ahead of time are those that an engine looks for: on CPU devices the whole way."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import find_architecture
from paxserve.engine.program_cache import ProgramCache
from paxserve.engine.program_specs import ProgramSpecs
from paxserve.errors import ConfigError
from paxserve.planning.executables import is_written, programs_of, write_programs
from tests.paxserve.planning.tiny_engines import GOLDEN, tiny_engine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(compile_sizes=[4], num_gpu_blocks_override=16)


def test_an_engine_finds_what_was_written(engine, tmp_path):
    lines = []
    paths = write_programs(engine, tmp_path, is_essential=True, report=lines.append)
    assert len(paths) == len(lines) == len(list(tmp_path.iterdir())) == 2 + 4
    hf_config = json.loads(GOLDEN.read_text())
    architecture = find_architecture(hf_config)
    model = architecture.Model(
        architecture.Config.from_hf(hf_config), dtype=jnp.float32, layer_execution="scanned",
        max_model_len=engine.max_model_len, rngs=nnx.Rngs(0),
    )  # fmt: skip
    specs = ProgramSpecs(model, engine.config, num_pages=16, max_model_len=engine.max_model_len)
    assert repr(specs.identity) == repr(engine.specs.identity)
    cache = ProgramCache(tmp_path, *specs.identity)
    for layout in specs.essential_layouts():
        program = cache.get(repr(layout), lambda: pytest.fail("it was compiled again"))
        weights = jax.tree.leaves(nnx.state(model))
        state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs.state)
        packed = jnp.zeros(layout.size, jnp.int32)
        *_, out = program(weights, jax.jit(specs.make_pool)(), state, None, packed)
        assert out.tokens.shape == (layout.num_rows,)
    assert cache.num_loaded == 2


def test_all_programs_are_those_of_the_engine(engine):
    specs = engine.specs
    assert set(programs_of(engine, is_essential=False)) == {
        *specs.plain_layouts, *specs.rich_layouts, *specs.helpers()
    }  # fmt: skip


def test_a_file_that_does_not_hold_it_is_seen(engine, tmp_path):
    (layout, *_) = engine.specs.essential_layouts()
    program = engine.specs.step(layout).compile()
    path = tmp_path / "program.xla"
    assert not is_written(path, program)
    path.write_bytes(b"half of it")
    assert not is_written(path, program)


def test_a_folder_that_cannot_be_written_is_an_error(engine, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="does not hold"):
        write_programs(engine, tmp_path / "file", is_essential=True, report=lambda line: None)
