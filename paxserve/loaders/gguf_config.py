"""What config.json would say, from the metadata of a GGUF file.

llama.cpp's converter renames the settings, drops some that its graphs hard-code, and bakes Llama 3's rope
scaling into a tensor of factors; this module undoes all three.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from paxserve.errors import ConfigError

ROPE_THETA, GEMMA3_ROPE_THETA, GEMMA3_LOCAL_ROPE_THETA = 10000.0, 1e6, 10000.0
GEMMA3_27B_LAYERS = 62
GEMMA3_WINDOW_PATTERN = 6
SMOLLM3_NOPE_INTERVAL = 4
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FILE_TYPE_DTYPES = {0: "float32", 1: "float16"}  # everything quantised came from bfloat16


class GgufArchitecture(NamedTuple):
    """How one `general.architecture` of GGUF corresponds to Hugging Face."""

    model_type: str
    class_name: str
    permutes_qk: bool = False
    """The converter interleaved the rows of q and k, for llama.cpp's rope on neighbouring pairs."""
    norm_offset: float = 0.0
    """What the converter added to the weights of norms."""


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", permutes_qk=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "smollm3": GgufArchitecture("smollm3", "SmolLM3ForCausalLM", permutes_qk=True),
    "gemma3": GgufArchitecture("gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0),
}


class GgufMetadata:
    """Typed access to a GGUF file's metadata, whose keys are prefixed with the architecture."""

    def __init__(self, entries: Mapping[str, Any], source: str) -> None:
        self.entries = entries
        self.source = source
        self.arch: str = entries.get("general.architecture", "")
        if self.arch not in ARCHITECTURES:
            raise ConfigError(
                f"{source} has the architecture {self.arch!r}; supported in GGUF are "
                f"{', '.join(sorted(ARCHITECTURES))}."
            )
        self.architecture = ARCHITECTURES[self.arch]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `{architecture}.{key}`."""
        return self.entries.get(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """The value of `{architecture}.{key}`; `ConfigError` when it is absent, not positive or not one number."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # some converters repeat it for each layer
            value = value[0]
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            got = "nothing" if value is None else f"{value!r}"
            raise ConfigError(f"{self.source} must give one positive number as {self.arch}.{key}, got {got}.")
        return value


def build_hf_config(
    metadata: GgufMetadata, *, vocab_size: int, tensor_names: Collection[str], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """The dictionary that config.json would hold; `rope_factors` is the tensor rope_freqs, if there is one."""
    if metadata.get("expert_count", 0):
        raise ConfigError(f"{metadata.source} is a mixture of experts, which is not supported from GGUF.")
    num_layers = len({name.split(".")[1] for name in tensor_names if name.startswith("blk.")})
    if metadata.number("block_count") != num_layers:
        raise ConfigError(
            f"{metadata.source} says {metadata.arch}.block_count {metadata.number('block_count')}, "
            f"but holds the tensors of {num_layers} layers."
        )
    hidden_size, num_heads = metadata.number("embedding_length"), metadata.number("attention.head_count")
    head_dim = metadata.number("attention.key_length", hidden_size // num_heads)
    config = {
        "model_type": metadata.architecture.model_type,
        "architectures": [metadata.architecture.class_name],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_up.bias" in tensor_names,
        "sliding_window": None,
        "rope_parameters": _rope_parameters(metadata, head_dim, rope_factors),
        "dtype": FILE_TYPE_DTYPES.get(metadata.entries.get("general.file_type", -1), "bfloat16"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = metadata.entries.get(f"tokenizer.ggml.{key}_token_id")
    if metadata.arch == "gemma3":
        config |= _gemma3_settings(metadata, config)
    if metadata.arch == "smollm3":
        layers = range(1, config["num_hidden_layers"] + 1)
        config["no_rope_layer_interval"] = SMOLLM3_NOPE_INTERVAL
        config["no_rope_layers"] = [int(layer % SMOLLM3_NOPE_INTERVAL != 0) for layer in layers]
    return config


def build_generation_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Default end tokens: a GGUF file may name an end of turn and an end of message besides eos."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(metadata.entries[key] for key in keys if key in metadata.entries))
    return {"eos_token_id": ids} if len(ids) > 1 else {}


def _rope_parameters(metadata: GgufMetadata, head_dim: int, rope_factors: np.ndarray | None) -> dict[str, Any]:
    default_theta = GEMMA3_ROPE_THETA if metadata.arch == "gemma3" else ROPE_THETA
    parameters: dict[str, Any] = {
        "rope_theta": float(metadata.number("rope.freq_base", default_theta)),
        "rope_type": "default",
    }
    rotary_dim = metadata.number("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        parameters["partial_rotary_factor"] = rotary_dim / head_dim
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    kind = metadata.get("rope.scaling.type", "linear" if factor else "none")
    if rope_factors is not None:
        return parameters | _llama3_scaling(metadata, rope_factors, parameters["rope_theta"], rotary_dim)
    if kind == "none" or not factor or factor == 1.0:
        return parameters
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{metadata.source} has rope scaling of type {kind!r}; supported in GGUF are linear and yarn."
        )
    if metadata.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ConfigError(f"{metadata.source} sets {metadata.arch}.rope.scaling.attn_factor, which is not supported.")
    parameters |= {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length")
        parameters["original_max_position_embeddings"] = original or round(metadata.number("context_length") / factor)
        for name in ("beta_fast", "beta_slow"):
            if (value := metadata.get(f"rope.scaling.yarn_{name}")) is not None:
                parameters[name] = float(value)
    return parameters


def _llama3_scaling(metadata: GgufMetadata, factors: np.ndarray, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which the file holds only the resulting divisor of each frequency."""
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4), **LLAMA3_SCALING}
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(
            f"{metadata.source}: its rope_freqs.weight is not Llama 3's rope scaling, the only one known."
        )
    return scaling


def _gemma3_settings(metadata: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    is_local = metadata.get("attention.sliding_window_pattern")
    if not isinstance(is_local, list) or len(is_local) != num_layers:
        pattern = metadata.number("attention.sliding_window_pattern", GEMMA3_WINDOW_PATTERN)
        is_local = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    is_27b = num_layers == GEMMA3_27B_LAYERS
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "sliding_window": metadata.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {
                "rope_theta": float(metadata.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA)),
                "rope_type": "default",
            },
        },
    }
