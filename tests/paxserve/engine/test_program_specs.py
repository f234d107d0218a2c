"""The engine's programs from shapes alone: equal to those of real weights, and compiled without any."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import find_architecture
from paxserve.config import EngineConfig
from paxserve.engine.program_specs import ProgramSpecs
from paxserve.platform import PLATFORMS, resolve

GOLDEN = Path(__file__).parents[2] / "goldens" / "llama"


@pytest.fixture(scope="module")
def build():
    hf_config = json.loads((GOLDEN / "config.json").read_text())
    architecture = find_architecture(hf_config)
    config = architecture.Config.from_hf(hf_config)
    return lambda: architecture.Model(config, dtype=jnp.float32, layer_execution="looped", rngs=nnx.Rngs(0))


def specs_of(model, **flags):
    flags = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "dtype": "float32"} | flags
    config = resolve(EngineConfig.from_flags(model="llama", **flags), PLATFORMS["cpu"])
    return ProgramSpecs(model, config, num_pages=16, max_model_len=64)


def test_real_and_abstract_weights_make_the_same_programs(build):
    real, abstract = specs_of(build()), specs_of(nnx.eval_shape(build))
    assert repr(real.identity) == repr(abstract.identity)
    assert real.weights == abstract.weights
    (layout, *_) = real.essential_layouts()
    assert real.step(layout).lower().as_text() == abstract.step(layout).lower().as_text()


def test_no_array_is_kept(build):
    specs = specs_of(build())
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(vars(specs)))


def test_every_program_compiles_and_overwrites_what_it_is_given(build):
    specs = specs_of(nnx.eval_shape(build), compile_sizes=[4])
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(specs.pool))
    steps = [specs.step(layout) for layout in (*specs.plain_layouts, *specs.rich_layouts)]
    for program in (*steps, *specs.helpers().values()):
        memory = program.compile().memory_analysis()
        first = program.arguments[program.donated[0]]
        donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(first))
        assert memory.alias_size_in_bytes >= donated
    assert steps[0].compile().memory_analysis().alias_size_in_bytes >= pool_bytes


@pytest.mark.parametrize("change", [{"block_size": 32}, {"max_num_seqs": 5}, {"layer_execution": "unrolled"}])
def test_identity_tells_what_programs_depend_on(build, change):
    model = nnx.eval_shape(build)
    assert repr(specs_of(model).identity) != repr(specs_of(model, **change).identity)


def test_essential_steps_can_run_anything_plain(build):
    layouts = list(specs_of(nnx.eval_shape(build)).essential_layouts())
    assert [(layout.num_tokens, layout.num_rows) for layout in layouts] == [(1, 1), (4, 4), (32, 4)]
    assert all(dataclasses.replace(layout, is_rich=False) == layout for layout in layouts)
