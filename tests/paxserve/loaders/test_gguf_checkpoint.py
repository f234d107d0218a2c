import gguf
import numpy as np
import pytest

from paxserve.errors import ConfigError
from paxserve.loaders.gguf_checkpoint import GgufCheckpoint
from tests.paxserve.loaders.tiny_checkpoints import (
    FFN,
    HEAD_DIM,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    TOKENS,
    gguf_name,
    llama_tensors,
    write_llama_gguf,
)

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0"]


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType[name] for name in KINDS], ids=KINDS)
def test_round_trip(tmp_path, kind):
    weights = llama_tensors()
    checkpoint = GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf", tensors=weights, quantization=kind), name="m")
    assert set(checkpoint.tensors) == set(weights)
    for name, weight in weights.items():
        # Rows are quantised one by one, so the order that q and k were stored in leaves the values alone.
        expected = gguf.dequantize(gguf.quantize(weight, kind), kind) if weight.ndim == 2 else weight
        assert checkpoint.tensors[name] == (weight.shape, np.float32)
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)


def test_only_the_llama_kind_stores_q_and_k_in_another_order(tmp_path):
    weights = llama_tensors()
    checkpoint = GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf", arch="qwen2", tensors=weights))
    for name, weight in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), weight, err_msg=name)


def test_biases(tmp_path):
    weights = llama_tensors()
    rng = np.random.default_rng(3)
    for layer in range(NUM_LAYERS):
        for projection, num_heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            bias = rng.standard_normal(num_heads * HEAD_DIM).astype(np.float32)
            weights[f"model.layers.{layer}.self_attn.{projection}_proj.bias"] = bias
    checkpoint = GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf", tensors=weights))
    assert checkpoint.hf_config["attention_bias"] is True
    for name in weights:
        np.testing.assert_array_equal(checkpoint.read(name), weights[name], err_msg=name)


def test_config(tmp_path):
    config = GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf")).hf_config
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_an_output_tensor_unties_the_head(tmp_path):
    weights = llama_tensors() | {"lm_head.weight": np.ones((len(TOKENS), HIDDEN), np.float32)}
    checkpoint = GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf", tensors=weights))
    assert checkpoint.hf_config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), weights["lm_head.weight"])


def test_gemma3_norms_lose_the_one_that_the_converter_added(tmp_path):
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(16)
        writer.add_tensor("blk.0.post_attention_norm.weight", np.full((HIDDEN,), 1.25, np.float32))
        writer.add_tensor("blk.0.post_ffw_norm.weight", np.full((HIDDEN,), 3.0, np.float32))
        writer.add_tensor("blk.0.attn_q_norm.weight", np.full((HEAD_DIM,), 0.5, np.float32))

    weights = llama_tensors()
    checkpoint = GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf", arch="gemma3", tensors=weights, edit=edit))
    prefix = "model.layers.0."
    assert checkpoint.read(prefix + "post_attention_layernorm.weight")[0] == 0.25
    assert checkpoint.read(prefix + "post_feedforward_layernorm.weight")[0] == 2.0
    assert checkpoint.read(prefix + "self_attn.q_norm.weight")[0] == -0.5
    ffn_norm = weights[prefix + "post_attention_layernorm.weight"]
    np.testing.assert_array_equal(checkpoint.read(prefix + "pre_feedforward_layernorm.weight"), ffn_norm - 1)
    q_proj = prefix + "self_attn.q_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(q_proj), weights[q_proj])


def test_unknown_architecture(tmp_path):
    path = write_llama_gguf(tmp_path / "m.gguf", arch="mamba")
    with pytest.raises(ConfigError, match="has the architecture 'mamba'; supported in GGUF are gemma3, llama"):
        GgufCheckpoint(path)


def test_unknown_tensor(tmp_path):
    path = write_llama_gguf(
        tmp_path / "m.gguf", edit=lambda writer: writer.add_tensor("blk.0.mystery.weight", np.ones(32, np.float32))
    )
    with pytest.raises(ConfigError, match=r"has a tensor 'blk\.0\.mystery\.weight', unknown in the architecture llama"):
        GgufCheckpoint(path)


def test_no_embedding(tmp_path):
    weights = llama_tensors()
    del weights["model.embed_tokens.weight"]
    with pytest.raises(ConfigError, match=r"has no tensor token_embd\.weight"):
        GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf", tensors=weights))


def test_split_file(tmp_path):
    path = write_llama_gguf(tmp_path / "m.gguf", edit=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ConfigError, match="one part of a split model"):
        GgufCheckpoint(path)


def test_without_weights(tmp_path):
    checkpoint = GgufCheckpoint(write_llama_gguf(tmp_path / "m.gguf"), with_weights=False)
    assert checkpoint.tensors == {}
    assert checkpoint.hf_config["vocab_size"] == len(TOKENS)


def test_names_used_here_are_llama_cpps():
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    for name in llama_tensors():
        assert names.get_name(name, try_suffixes=(".weight",)) == gguf_name(name)
