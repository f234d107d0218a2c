import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from models import llama, stablelm
from models.layers.config import DecoderConfig
from models.layers.weight_map import stored, transposed
from paxserve.errors import ConfigError
from paxserve.loaders.tensor_spec import TensorSpec
from paxserve.loaders.weights import choose_architecture, load_model
from sharding.mesh import make_mesh
from sharding.rules import weight_sharding
from tests.paxserve.loaders.tiny_checkpoints import (
    FFN,
    HEAD_DIM,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    TOKENS,
    llama_tensors,
)

CONFIG = llama.Config(
    vocab_size=len(TOKENS),
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=NUM_HEADS,
    num_key_value_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q, K, V = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")


class MemoryCheckpoint:
    """A checkpoint of arrays in memory, which remembers what was read."""

    name = "tiny"

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.tensors = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays.items()}
        self.reads: list[str] = []

    def read(self, name: str) -> np.ndarray:
        self.reads.append(name)
        return self.arrays[name]


def load(arrays: dict[str, np.ndarray], architecture=llama, config=CONFIG, dtype=jnp.float32, **options) -> nnx.Module:
    return load_model(architecture, config, MemoryCheckpoint(arrays), dtype=dtype, **options)


def refusal(arrays: dict[str, np.ndarray], **options) -> str:
    checkpoint = MemoryCheckpoint(arrays)
    with pytest.raises(ConfigError) as caught:
        load_model(llama, dataclasses.replace(CONFIG, **options), checkpoint, dtype=jnp.float32)
    assert not checkpoint.reads  # refused before any memory was taken
    return str(caught.value)


def layer_weights(model: nnx.Module, layer: int) -> dict[str, np.ndarray]:
    """The layer's parameters, however the model lays its layers out."""
    if len(model.layers) == NUM_LAYERS:
        state = nnx.state(model.layers[layer])
    else:
        state = jax.tree.map(lambda leaf: leaf[layer], nnx.state(model.layers[0]))
    return {".".join(path): np.asarray(param.get_value()) for path, param in nnx.to_flat_state(state)}


@pytest.mark.parametrize("execution", ["unrolled", "scanned"])
def test_each_number_is_in_its_place(execution):
    arrays = llama_tensors()
    model = load(arrays, layer_execution=execution)
    weights = layer_weights(model, 1)
    qkv = weights["attention.qkv.weight"].reshape(HIDDEN, NUM_KV_HEADS, -1, HEAD_DIM)
    num_groups = NUM_HEADS // NUM_KV_HEADS
    np.testing.assert_array_equal(qkv[:, :, :num_groups].reshape(HIDDEN, -1), arrays[Q].T)
    np.testing.assert_array_equal(qkv[:, :, num_groups].reshape(HIDDEN, -1), arrays[K].T)
    np.testing.assert_array_equal(qkv[:, :, num_groups + 1].reshape(HIDDEN, -1), arrays[V].T)
    np.testing.assert_array_equal(weights["attention.out.weight"], arrays["model.layers.1.self_attn.o_proj.weight"].T)
    for part in ("gate", "up", "down"):
        np.testing.assert_array_equal(weights[f"mlp.{part}.weight"], arrays[f"model.layers.1.mlp.{part}_proj.weight"].T)
    np.testing.assert_array_equal(weights["mlp_norm.weight"], arrays["model.layers.1.post_attention_layernorm.weight"])
    np.testing.assert_array_equal(model.embedding.weight.get_value(), arrays[EMBEDDING])
    np.testing.assert_array_equal(model.norm.weight.get_value(), arrays["model.norm.weight"])


def test_fused_tensor_is_dealt_out_like_its_parts():
    class Fused:
        Model = llama.Model
        load_map = {
            **llama.load_map,
            "layers.*.attention.qkv.weight": transposed("model.layers.*.self_attn.qkv_proj.weight"),
        }

    arrays = llama_tensors()
    expected = layer_weights(load(arrays), 1)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}.self_attn."
        parts = [arrays.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
        arrays[f"{prefix}qkv_proj.weight"] = np.concatenate(parts)
    np.testing.assert_equal(layer_weights(load(arrays, Fused), 1), expected)


@pytest.mark.parametrize(
    ("stored", "wanted"), [(ml_dtypes.bfloat16, "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_casts_to_the_models_type(stored, wanted):
    arrays = {name: array.astype(stored) for name, array in llama_tensors().items()}
    weights = layer_weights(load(arrays, dtype=wanted), 0)
    assert {str(array.dtype) for array in weights.values()} == {wanted}
    expected = arrays["model.layers.0.mlp.up_proj.weight"].T.astype(weights["mlp.up.weight"].dtype)
    np.testing.assert_array_equal(weights["mlp.up.weight"], expected)


def test_missing_tensor():
    arrays = llama_tensors()
    del arrays[K]
    assert f"1 missing ({K})" in refusal(arrays)


def test_many_missing_tensors_are_counted():
    message = refusal(llama_tensors(), num_hidden_layers=NUM_LAYERS + 2)
    assert "18 missing (model.layers.2." in message
    assert "and 10 more" in message


def test_unexpected_tensor():
    arrays = llama_tensors() | {"model.layers.1.self_attn.q_proj.bias": np.zeros(HIDDEN, np.float32)}
    assert "1 unexpected (model.layers.1.self_attn.q_proj.bias)" in refusal(arrays)
    assert "missing" in refusal(llama_tensors(), attention_bias=True)


def test_renamed_tensor_is_recognised():
    arrays = llama_tensors()
    arrays["model.norms.weight"] = arrays.pop("model.norm.weight")
    assert "model.norms.weight is there instead of model.norm.weight" in refusal(arrays)


def test_wrong_shape_and_type():
    arrays = llama_tensors()
    arrays[V] = arrays[V].T.copy()
    arrays["model.norm.weight"] = np.zeros(HIDDEN, np.int8)
    message = refusal(arrays)
    assert f"{V} should be [32, 64], is [64, 32]" in message
    assert "model.norm.weight should be of a float type, is int8" in message


def test_non_weights_are_ignored():
    arrays = llama_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    checkpoint = MemoryCheckpoint(arrays)
    load_model(llama, CONFIG, checkpoint, dtype=jnp.float32)
    assert sorted(checkpoint.reads) == sorted(llama_tensors())


def test_untied_model_needs_its_head():
    assert f"1 missing ({HEAD})" in refusal(llama_tensors(), tie_word_embeddings=False)


def test_equal_head_stays_tied(caplog):
    arrays = llama_tensors()
    model = load(arrays | {HEAD: arrays[EMBEDDING].copy()})
    assert model.head is None
    assert not caplog.records


def test_different_head_wins_over_the_configuration(caplog):
    arrays = llama_tensors()
    arrays[HEAD] = arrays[EMBEDDING] + 1
    with caplog.at_level(logging.WARNING):
        model = load(arrays)
    assert "lm_head.weight differs" in caplog.text
    hidden = np.random.default_rng(0).standard_normal((2, HIDDEN)).astype(np.float32)
    np.testing.assert_allclose(model.logits(jnp.asarray(hidden)), hidden @ arrays[HEAD].T, rtol=1e-4, atol=1e-4)


def test_tied_table_may_be_stored_as_the_head():
    arrays = llama_tensors()
    table = arrays[HEAD] = arrays.pop(EMBEDDING)
    model = load(arrays)
    np.testing.assert_array_equal(model.embedding.weight.get_value(), table)
    del arrays[HEAD]
    assert f"1 missing ({EMBEDDING})" in refusal(arrays)


@pytest.mark.parametrize("execution", ["unrolled", "scanned"])
def test_dummy_weights_are_seeded(execution):
    first, again, other = (
        load({}, is_dummy=True, seed=seed, layer_execution=execution, dtype=jnp.bfloat16) for seed in (1, 1, 2)
    )
    weights = layer_weights(first, 0)
    np.testing.assert_equal(weights, layer_weights(again, 0))
    np.testing.assert_array_equal(weights["attention_norm.weight"], np.ones(HIDDEN))
    for name in ("mlp.gate.weight", "mlp.up.weight"):
        assert weights[name].astype(np.float32).std() == pytest.approx(0.02, rel=0.1)
        assert (weights[name] != layer_weights(other, 0)[name]).mean() > 0.9
    assert (weights["mlp.gate.weight"] != weights["mlp.up.weight"]).mean() > 0.9
    assert (weights["mlp.up.weight"] != layer_weights(first, 1)["mlp.up.weight"]).mean() > 0.9


@pytest.mark.parametrize("options", [{}, {"is_dummy": True}, {"layer_execution": "scanned"}])
def test_weights_go_where_the_rule_says(options):
    device = jax.devices()[3]
    seen = set()

    def rule(axes):
        seen.add(axes)
        return SingleDeviceSharding(device)

    model = load(llama_tensors(), sharding=rule, **options)
    assert {leaf.device for leaf in jax.tree.leaves(nnx.state(model))} == {device}
    stacked = ("layers",) if options.get("layer_execution") == "scanned" else ()
    assert {("vocab", "embed"), (*stacked, "embed", "kv_heads"), (*stacked, "mlp", "embed")} <= seen


@pytest.mark.parametrize("execution", ["unrolled", "scanned"])
@pytest.mark.parametrize("tensor", [2, 3, 8])
def test_shards_are_parts_of_the_whole(tensor, execution):
    """Heads, vocabulary and columns are padded for 3, kv heads copied for 8; no tensor is read twice for its shards."""
    mesh = make_mesh(jax.devices(), tensor=tensor)
    options = {"layer_execution": execution, "tensor_shards": tensor}
    checkpoint = MemoryCheckpoint(llama_tensors())
    spread = load_model(
        llama, CONFIG, checkpoint, dtype=jnp.float32, sharding=partial(weight_sharding, mesh), **options
    )
    whole = load(llama_tensors(), **options)
    for (path, there), (_, here) in zip(
        *(nnx.to_flat_state(nnx.state(model)) for model in (spread, whole)), strict=True
    ):
        assert there.get_value().sharding == weight_sharding(mesh, there.get_metadata("out_sharding")), path
        np.testing.assert_array_equal(there.get_value(), here.get_value())
    assert sorted(checkpoint.reads) == sorted(llama_tensors())
    out = spread.layers[0].attention.out.weight.get_value()
    assert out.addressable_shards[0].data.size == out.size // tensor


def test_the_host_holds_no_more_than_a_shard(monkeypatch):
    sizes = []
    device_put = jax.device_put

    def record(array, *args):
        sizes.append(array.size)
        return device_put(array, *args)

    monkeypatch.setattr(jax, "device_put", record)
    mesh = make_mesh(jax.devices(), tensor=4)
    model = load(llama_tensors(), tensor_shards=4, sharding=partial(weight_sharding, mesh))
    leaves = jax.tree.leaves(nnx.state(model))
    assert max(sizes) == max(leaf.addressable_shards[0].data.size for leaf in leaves)
    assert max(sizes) == max(leaf.size for leaf in leaves) // 4


def test_checkpoint_without_the_models_prefix():
    arrays = llama_tensors()
    bare = {name.removeprefix("model."): array for name, array in arrays.items()}
    np.testing.assert_equal(layer_weights(load(bare), 1), layer_weights(load(arrays), 1))
    del bare["layers.1.mlp.up_proj.weight"]
    assert "1 missing (layers.1.mlp.up_proj.weight)" in refusal(bare)


def stablelm_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = llama_tensors()
    for name in [name for name in arrays if name.endswith("norm.weight")]:
        arrays[name.replace(".weight", ".bias")] = rng.standard_normal(HIDDEN).astype(np.float32)
    for layer in range(NUM_LAYERS):
        for kind, num_heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS)):
            for head in range(num_heads):
                name = f"model.layers.{layer}.self_attn.{kind}_layernorm.norms.{head}.weight"
                arrays[name] = rng.standard_normal(HEAD_DIM).astype(np.float32)
    return arrays


@pytest.mark.parametrize("execution", ["unrolled", "scanned"])
def test_entries_with_tensors_of_their_own(execution):
    shared = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(DecoderConfig)}
    config = stablelm.Config(**shared, qk_layernorm=True)
    arrays = stablelm_tensors()
    weights = layer_weights(load(arrays, stablelm, config, layer_execution=execution), 1)
    prefix = "model.layers.1.self_attn.q_layernorm.norms."
    expected = np.stack([arrays[f"{prefix}{head}.weight"] for head in range(NUM_HEADS)])
    np.testing.assert_array_equal(weights["attention.q_norm.weight"], expected)


def test_tensor_under_its_other_name():
    class Renamed:
        Model = llama.Model
        load_map = {**llama.load_map, "norm.weight": stored("model.norm.weight", otherwise="model.final_norm.weight")}

    arrays = llama_tensors()
    expected = arrays["model.norm.weight"]
    np.testing.assert_array_equal(load(arrays, Renamed).norm.weight.get_value(), expected)
    arrays["model.final_norm.weight"] = arrays.pop("model.norm.weight")
    np.testing.assert_array_equal(load(arrays, Renamed).norm.weight.get_value(), expected)


def test_unsupported_architectures_and_settings_are_configuration_errors():
    checkpoint = MemoryCheckpoint({})
    checkpoint.hf_config = {"model_type": "lama"}
    with pytest.raises(ConfigError, match=r"tiny: model_type 'lama' is not supported.*closest one is llama"):
        choose_architecture(checkpoint)
    checkpoint.hf_config = {"model_type": "llama", "hidden_size": 64}
    with pytest.raises(ConfigError, match="tiny: config.json lacks vocab_size"):
        choose_architecture(checkpoint)
