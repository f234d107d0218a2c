"""The TPU kernel compiled by the real compiler for described chips, in the sizes of real models' experts."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.grouped_matmul import grouped_matmul
from sharding.topology import describe

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_aot

# Rows, experts, K, N.
MODELS = {
    "qwen3-30b-a3b gate, decode": (64 * 8, 128, 2048, 768),
    "qwen3-30b-a3b down, prefill": (2048 * 8, 128, 768, 2048),
    "mixtral-8x7b gate, decode": (16 * 2, 8, 4096, 14336),
    "mixtral-8x7b down": (512 * 2, 8, 14336, 4096),
    "deepseek-v3 gate, an eighth of its experts": (64 * 8, 32, 7168, 2048),
    "gpt-oss gate": (64 * 4, 32, 2880, 2880),
}
CASES = [("v5e:1x1", name) for name in MODELS] + [("v6e:1x1", name) for name in MODELS]


@pytest.mark.parametrize(("topology", "model"), CASES)
def test_compiles_without_copying_the_experts(topology, model):
    num_rows, num_experts, in_size, out_size = MODELS[model]
    mesh = describe(topology).mesh((1,), ("tensor",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def two_layers(x, weights, sizes, layer):
        return grouped_matmul(x, weights, sizes, first_group=layer * num_experts, backend="tpu")

    weights = array((2 * num_experts, in_size, out_size), jnp.bfloat16)
    with jax.set_mesh(mesh):
        arguments = (array((num_rows, in_size), jnp.bfloat16), weights, array((num_experts,), jnp.int32))
        compiled = jax.jit(two_layers).lower(*arguments, array((), jnp.int32)).compile()
    assert "grouped_matmul" in compiled.as_text()
    # Rows and results padded to whole tiles, no more.
    assert compiled.memory_analysis().temp_size_in_bytes < 2e6 + 4 * num_rows * (in_size + out_size)
