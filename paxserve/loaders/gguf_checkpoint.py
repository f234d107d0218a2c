"""A GGUF file seen as a Hugging Face checkpoint: its tensors by Hugging Face's names, in float32."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.errors import ConfigError
from paxserve.loaders.gguf_config import GgufMetadata, build_generation_config, build_hf_config
from paxserve.loaders.gguf_file import GgufFile
from paxserve.loaders.gguf_tokenizer import build_tokenizer
from paxserve.loaders.tensor_spec import TensorSpec
from paxserve.loaders.tokenizer import Tokenizer

EMBEDDING, ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 norms what goes into and what comes out of both halves of a layer.
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GgufCheckpoint:
    """A checkpoint in one .gguf file; opening it reads and checks the header, and no weight."""

    def __init__(self, path: Path, *, name: str | None = None, with_weights: bool = True) -> None:
        self.path = path
        self.name = name or str(path)
        self._file = GgufFile(path)
        self._metadata = GgufMetadata(self._file.metadata, str(path))
        stored = self._file.tensors
        if EMBEDDING not in stored:
            raise ConfigError(f"{path} has no tensor {EMBEDDING}.")
        if self._metadata.entries.get("split.count", 1) > 1:
            raise ConfigError(f"{path} is one part of a split model: merge the parts with llama-gguf-split first.")
        self.hf_config: dict[str, Any] = build_hf_config(
            self._metadata,
            vocab_size=stored[EMBEDDING].shape[0],
            tensor_names=stored,
            rope_factors=self._file.read(ROPE_FACTORS) if ROPE_FACTORS in stored else None,
        )
        self.generation_config: dict[str, Any] = build_generation_config(self._metadata)
        self._stored_name: dict[str, str] = {}
        if with_weights:
            self._stored_name = {
                self._hf_name(stored_name): stored_name for stored_name in stored if stored_name != ROPE_FACTORS
            }
        self.tensors: Mapping[str, TensorSpec] = {
            hf_name: TensorSpec(stored[stored_name].shape, np.dtype(np.float32))
            for hf_name, stored_name in self._stored_name.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` in float32, as Hugging Face lays it out."""
        stored_name = self._stored_name[name]
        tensor = self._file.read(stored_name)
        architecture = self._metadata.architecture
        if architecture.permutes_qk and (match := re.search(r"\.attn_([qk])\.(?:weight|bias)$", stored_name)):
            tensor = self._unpermute(tensor, is_query=match[1] == "q")
        if architecture.norm_offset and stored_name.endswith("norm.weight"):
            tensor = tensor - np.float32(architecture.norm_offset)
        return tensor

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer built from the file's metadata."""
        return build_tokenizer(self._file.metadata, str(self._file.path))

    def _unpermute(self, tensor: np.ndarray, *, is_query: bool) -> np.ndarray:
        """Rows of q or k with each head's pairs (0, 1), (2, 3) … moved back to (0, H/2), (1, H/2 + 1) …"""
        num_heads = self.hf_config["num_attention_heads" if is_query else "num_key_value_heads"]
        pairs = tensor.reshape(num_heads, self.hf_config["head_dim"] // 2, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    def _hf_name(self, stored_name: str) -> str:
        layer_names = GEMMA3_LAYER_NAMES if self._metadata.arch == "gemma3" else LAYER_NAMES
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored_name)
        names = layer_names if match and match[1] else TOP_NAMES
        if not match or match[2] not in names:
            raise ConfigError(
                f"{self._file.path} has a tensor {stored_name!r}, unknown in the architecture {self._metadata.arch}."
            )
        prefix = f"model.layers.{match[1]}." if match[1] else ""
        return f"{prefix}{names[match[2]]}.{match[3]}"
