import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import llama, smollm3
from models.inputs import Batch, PagedKVCache
from models.layers.decoder import arrange_layers
from pallas_kernels.ragged_paged_attention import AttentionMetadata, make_pool

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
EXECUTIONS = ("unrolled", "scanned", "looped")


def abstract(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_pool_is_updated_in_place(execution):
    config = smollm3.Config.from_hf(SIZES | {"use_sliding_window": True, "sliding_window": 8})
    model = smollm3.Model(config, layer_execution=execution, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    spec = model.cache_spec
    pool = jax.eval_shape(
        lambda: make_pool(
            "xla", num_layers=spec.num_layers, num_pages=4096, page_size=4, num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, dtype=jnp.float32,
        )
    )  # fmt: skip

    def step(state, pool, batch, metadata):
        hidden, cache = nnx.merge(graphdef, state)(batch, PagedKVCache(pool, metadata, "xla"))
        return hidden, cache.pool

    metadata = AttentionMetadata(abstract((3,)), abstract((2,)), abstract((2, 4)), abstract(()))
    batch = Batch(abstract((8,)), abstract((8,)))
    memory = jax.jit(step, donate_argnums=1).lower(state, pool, batch, metadata).compile().memory_analysis()
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4


def test_alike_layers_are_traced_once():
    model = nnx.eval_shape(lambda: llama.Model(llama.Config.from_hf(SIZES), rngs=nnx.Rngs(0)))
    structures = {jax.tree.structure(layer) for layer in model.layers}
    assert len(model.layers) == 4
    assert len(structures) == 1


def test_only_neighbours_of_one_structure_are_stacked():
    def build():
        model = llama.Model(llama.Config.from_hf(SIZES), rngs=nnx.Rngs(0))
        layers = list(model.layers)
        layers[2].mlp = None
        return arrange_layers(layers, "scanned")[0]

    layers = nnx.eval_shape(build)
    firsts = [layer.attention.out.weight.get_metadata("layers") for layer in layers]
    assert firsts == [(0, 2), (2, 1), (3, 1)]
    assert layers[0].attention.out.weight.get_value().shape == (2, 32, 32)


def test_unknown_execution():
    with pytest.raises(ValueError, match="got 'sideways'"):
        llama.Model(llama.Config.from_hf(SIZES), layer_execution="sideways", rngs=nnx.Rngs(0))
