"""A checkpoint converted and loaded again is the same model, in any layout and on any number of devices."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxserve import LLM, ConfigError, SamplingParams
from paxserve.cli import main
from paxserve.config import ModelConfig
from paxserve.conversion import convert, write_tokenizer
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.loaders.hf_tokenizer import load_folder_tokenizer
from paxserve.loaders.orbax_folder import MARKER, OrbaxFolder
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.loaders.weights import choose_architecture, load_model
from sharding.mesh import make_mesh
from sharding.rules import weight_sharding
from tests.small_tokenizers import byte_level_tokenizer

# A read that fails ends Orbax's event loop while its other reads are on their way; they then find it closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = ("qwen3", "llama_rope3_tied", "qwen2_moe")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    for name in NAMES:
        convert(ModelConfig(model=str(GOLDENS / name)), folder / name)
    return folder


def load(path, **options):
    checkpoint = open_checkpoint(ModelConfig(model=str(path)))
    architecture, config = choose_architecture(checkpoint)
    return load_model(architecture, config, checkpoint, dtype=jnp.float32, **options)


def leaves(model):
    return dict(nnx.to_flat_state(nnx.state(model)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("execution", ["looped", "scanned"])
def test_the_same_parameters(converted, name, execution):
    before = leaves(load(GOLDENS / name, layer_execution=execution))
    after = leaves(load(converted / name, layer_execution=execution))
    assert before.keys() == after.keys()
    for path, param in before.items():
        np.testing.assert_array_equal(param.get_value(), after[path].get_value(), err_msg=str(path))


def test_into_another_type_and_over_devices(converted):
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))

    def sharding(axes):
        return NamedSharding(mesh, PartitionSpec(*("tensor" if axis in ("mlp", "kv_heads") else None for axis in axes)))

    plain = leaves(load(GOLDENS / "qwen3", layer_execution="scanned"))
    checkpoint = open_checkpoint(ModelConfig(model=str(converted / "qwen3")))
    architecture, config = choose_architecture(checkpoint)
    for execution in ("unrolled", "scanned"):
        spread = leaves(
            load_model(
                architecture, config, checkpoint, dtype=jnp.bfloat16, layer_execution=execution, sharding=sharding
            )
        )
        path = ("layers", 0, "mlp", "up", "weight")
        value = spread[path].get_value()
        assert value.dtype == jnp.bfloat16
        assert len(value.sharding.device_set) == 4
        expected = plain[path].get_value()
        expected = expected if execution == "scanned" else expected[0]
        np.testing.assert_array_equal(value, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize(("name", "shards"), [("qwen3", 3), ("qwen2_moe", 4)])
@pytest.mark.parametrize("execution", ["looped", "scanned"])
def test_for_tensor_shards(converted, name, shards, execution):
    """Heads, columns and experts that do not divide: padded and copied as from the checkpoint that was converted."""
    options = {"layer_execution": execution, "tensor_shards": shards}
    options |= {"sharding": partial(weight_sharding, make_mesh(jax.devices(), tensor=shards))}
    before, after = (leaves(load(folder / name, **options)) for folder in (GOLDENS, converted))
    for path, param in before.items():
        value = after[path].get_value()
        np.testing.assert_array_equal(param.get_value(), value, err_msg=str(path))
        assert value.sharding.is_equivalent_to(param.get_value().sharding, value.ndim), path


@pytest.mark.slow  # two engines
def test_text_from_a_converted_folder(converted):
    prompt = {"prompt_token_ids": [5, 6, 7]}
    flags = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16, "compile_sizes": [16]}
    flags |= {"skip_tokenizer_init": True, "num_gpu_blocks_override": 8}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = [
        LLM(str(path / "qwen3"), **flags).generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        for path in (GOLDENS, converted)
    ]
    assert outputs[0] == outputs[1]


def test_vectors_from_a_converted_folder(tmp_path, capsys):
    assert main(["convert", str(GOLDENS / "pooling" / "st_bert"), str(tmp_path / "out")]) == 0
    assert "arrays" in capsys.readouterr().out
    data = json.loads((GOLDENS / "pooling" / "st_bert" / "texts.json").read_text())
    llm = LLM(str(tmp_path / "out"), max_num_seqs=4, max_num_batched_tokens=64, compile_sizes=[64])
    vectors = [output.outputs.embedding for output in llm.embed(data["texts"], use_tqdm=False)]
    np.testing.assert_allclose(vectors, data["vectors"], atol=1e-5)


def test_a_tied_head_stays_tied(converted):
    assert "head.weight" not in open_checkpoint(ModelConfig(model=str(converted / "llama_rope3_tied"))).tensors
    assert "head.weight" in open_checkpoint(ModelConfig(model=str(converted / "qwen3"))).tensors


def test_a_head_that_differs_from_the_table_it_is_said_to_be(tmp_path):
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    convert(ModelConfig(model=str(tmp_path / "in")), tmp_path / "out")
    assert "head" in {path[0] for path in leaves(load(tmp_path / "out"))}


def test_types(tmp_path):
    convert(ModelConfig(model=str(GOLDENS / "qwen3"), dtype="bfloat16"), tmp_path)
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
    assert isinstance(checkpoint, OrbaxFolder)
    assert {str(spec.dtype) for spec in checkpoint.tensors.values()} == {"bfloat16"}
    assert checkpoint.hf_config["dtype"] == "bfloat16"


def test_what_cannot_be_converted(converted, tmp_path):
    with pytest.raises(ConfigError, match="is not empty"):
        convert(ModelConfig(model=str(GOLDENS / "qwen3")), converted)
    with pytest.raises(ConfigError, match="converted already"):
        convert(ModelConfig(model=str(converted / "qwen3")), tmp_path / "out")
    with pytest.raises(ConfigError, match="no weights to convert"):
        convert(ModelConfig(model=str(GOLDENS / "qwen3"), load_format="dummy"), tmp_path / "out")
    with pytest.raises(ConfigError, match="load_format is safetensors, but"):
        open_checkpoint(ModelConfig(model=str(converted / "qwen3"), load_format="safetensors"))
    with pytest.raises(ConfigError, match="load_format is orbax, but"):
        open_checkpoint(ModelConfig(model=str(GOLDENS / "qwen3"), load_format="orbax"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / MARKER).unlink(), "has no .*safetensors"),
        (lambda folder: (folder / MARKER).write_text('{"version": 99}'), "format 99"),
        (lambda folder: shutil.rmtree(folder / "arrays"), "cannot be read"),
        (lambda folder: shutil.rmtree(folder / "arrays" / "embedding.weight"), "cannot be read"),
        (lambda folder: change(folder, num_hidden_layers=2), "unexpected .layers.2"),
        (lambda folder: change(folder, intermediate_size=64), r"up.weight should be \[\d+, 64\]"),
        (lambda folder: change(folder, num_hidden_layers=9), "missing .layers"),
    ],
)
def test_damaged_folders(converted, tmp_path, damage, message):
    folder = tmp_path / "copy"
    shutil.copytree(converted / "qwen3", folder)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def change(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def test_the_tokenizer_of_a_gguf_file_is_written_too(tmp_path):
    known = byte_level_tokenizer()
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer = Tokenizer(known.backend, special_tokens=known.special_tokens, chat_templates=templates)
    write_tokenizer(tokenizer, tmp_path)
    written = load_folder_tokenizer(tmp_path)
    assert written.encode("café") == known.encode("café")
    assert written.chat_templates == templates
    assert written.eos_token_id == known.eos_token_id
