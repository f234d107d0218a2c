import numpy as np
import pytest

from paxserve.errors import ConfigError
from paxserve.loaders.gguf_config import GgufMetadata, build_generation_config, build_hf_config

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def config_from(entries: dict, *, rope_factors: np.ndarray | None = None) -> dict:
    metadata = GgufMetadata(entries, "m.gguf")
    num_layers = entries.get(f"{metadata.arch}.block_count", 2)
    names = [f"blk.{layer}.attn_q.weight" for layer in range(num_layers)]
    return build_hf_config(metadata, vocab_size=10, tensor_names=names, rope_factors=rope_factors)


def as_arch(arch: str, **more: object) -> dict:
    entries = {key.replace("llama.", f"{arch}."): value for key, value in LLAMA.items()}
    return {**entries, "general.architecture": arch, **{f"{arch}.{key}": value for key, value in more.items()}}


def test_defaults():
    config = config_from(LLAMA)
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["sliding_window"] is None
    assert config["dtype"] == "bfloat16"


def test_explicit_head_dim_and_kv_heads():
    config = config_from(LLAMA | {"llama.attention.key_length": 32, "llama.attention.head_count_kv": 1})
    assert (config["head_dim"], config["num_key_value_heads"]) == (32, 1)


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "general.architecture"])
def test_missing_setting_is_named(key):
    with pytest.raises(ConfigError, match=rf"m\.gguf must give one positive number as {key}, got nothing"):
        config_from({k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize("value", [[96, 128], "many", True, 0, -1])
def test_setting_of_a_wrong_kind(value):
    with pytest.raises(ConfigError, match=r"llama\.feed_forward_length, got"):
        config_from(LLAMA | {"llama.feed_forward_length": value})


def test_a_list_of_equal_numbers_is_one_number():
    assert config_from(LLAMA | {"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2


def test_mixture_of_experts_is_refused():
    with pytest.raises(ConfigError, match="mixture of experts"):
        config_from(LLAMA | {"llama.expert_count": 8})


@pytest.mark.parametrize(("file_type", "dtype"), [(0, "float32"), (1, "float16"), (32, "bfloat16"), (15, "bfloat16")])
def test_dtype(file_type, dtype):
    assert config_from(LLAMA | {"general.file_type": file_type})["dtype"] == dtype


def test_linear_scaling():
    entries = LLAMA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_from(entries)["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


def test_yarn_scaling():
    entries = as_arch("qwen2", **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1e6})
    expected = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert config_from(entries)["rope_parameters"] == expected
    entries["qwen2.rope.scaling.original_context_length"] = 2048
    assert config_from(entries)["rope_parameters"]["original_max_position_embeddings"] == 2048


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling of type 'longrope'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5}, "attn_factor"),
    ],
)
def test_unknown_scaling(more, message):
    with pytest.raises(ConfigError, match=message):
        config_from(LLAMA | {"llama.rope.scaling.factor": 4.0} | more)


def test_partial_rotation():
    parameters = config_from(LLAMA | {"llama.rope.dimension_count": 8})["rope_parameters"]
    assert parameters["partial_rotary_factor"] == 0.5


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """The tensor rope_freqs, computed one frequency at a time as llama.cpp's converter does."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(factor):
    entries = LLAMA | {"llama.attention.key_length": 128, "llama.rope.freq_base": 500000.0}
    config = config_from(entries, rope_factors=llama3_factors(factor, 500000.0, 128))
    assert config["rope_parameters"] == {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("factors", [np.linspace(1, 8, 64, dtype=np.float32), np.ones(3, np.float32)])
def test_other_rope_factors_are_refused(factors):
    entries = LLAMA | {"llama.attention.key_length": 128, "llama.rope.freq_base": 500000.0}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not Llama 3's"):
        config_from(entries, rope_factors=factors)


def test_layers_must_be_as_many_as_their_tensors():
    metadata = GgufMetadata(LLAMA | {"llama.block_count": 2**32 - 1}, "m.gguf")
    with pytest.raises(ConfigError, match=r"block_count 4294967295, but holds the tensors of 1 layers"):
        build_hf_config(metadata, vocab_size=10, tensor_names=["blk.0.attn_q.weight"], rope_factors=None)


def test_smollm3_skips_rope_in_every_fourth_layer():
    config = config_from(as_arch("smollm3", block_count=6))
    assert config["no_rope_layers"] == [1, 1, 1, 0, 1, 1]


def test_gemma3():
    entries = as_arch("gemma3", **{"attention.sliding_window": 512, "attention.key_length": 256, "block_count": 7})
    config = config_from(entries)
    assert config["model_type"] == "gemma3_text"
    assert config["sliding_window"] == 512
    assert config["query_pre_attn_scalar"] == 256
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4


def test_gemma3_window_pattern_of_the_file():
    pattern = {
        "attention.sliding_window": 512,
        "block_count": 3,
        "attention.sliding_window_pattern": [True, False, True],
    }
    layer_types = config_from(as_arch("gemma3", **pattern))["layer_types"]
    assert layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    pattern["attention.sliding_window_pattern"] = 2
    assert config_from(as_arch("gemma3", **pattern))["layer_types"] == layer_types


def test_generation_config_holds_every_end_token():
    ids = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 106, "tokenizer.ggml.eom_token_id": 1}
    assert build_generation_config(GgufMetadata(LLAMA | ids, "m")) == {"eos_token_id": [1, 106]}
    assert build_generation_config(GgufMetadata(LLAMA | {"tokenizer.ggml.eos_token_id": 1}, "m")) == {}
