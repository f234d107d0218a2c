"""Tiny checkpoints for the loader tests, written with the libraries that write real ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, FFN, NUM_LAYERS = 4, 2, 16, 64, 96, 2
TOKENS = ["<s>", "</s>", "<think>", "a", "b", "ab", "Ġ", "Ġa"]
KINDS = [3, 3, 4, 1, 1, 1, 1, 1]
MERGES = ["a b", "Ġ a"]


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of a tiny llama by Hugging Face name, norms included."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "self_attn.q_proj.weight"] = (NUM_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.k_proj.weight"] = (NUM_KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.v_proj.weight"] = (NUM_KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, NUM_HEADS * HEAD_DIM)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (FFN, HIDDEN)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, FFN)
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders those of q and k: row i of a head's first half, then of its second."""
    order = []
    for head in range(num_heads):
        start = head * HEAD_DIM
        for i in range(HEAD_DIM // 2):
            order += [start + i, start + HEAD_DIM // 2 + i]
    return weight[order]


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face llama tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem in GGUF_TOP_NAMES:
        return f"{GGUF_TOP_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[rest]}.{kind}"


def write_llama_gguf(
    path: Path,
    *,
    arch: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    edit: Callable[[gguf.GGUFWriter], Any] | None = None,
) -> Path:
    """Write a tiny model of the llama kind as llama.cpp's converter would; `edit` adds to the file."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    for name, weight in (llama_tensors() if tensors is None else tensors).items():
        if arch == "llama" and ".q_proj." in name:
            weight = interleave(weight, NUM_HEADS)
        if arch == "llama" and ".k_proj." in name:
            weight = interleave(weight, NUM_KV_HEADS)
        kind = quantization if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf_folder(path: Path, *, config: dict[str, Any] | None = None, weights: bool = True) -> Path:
    """Write a folder with config.json, and two tensors in model.safetensors if `weights`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama", "hidden_size": 4}))
    if weights:
        save_file({"a": np.ones((2, 3), np.float32), "b": np.arange(4, dtype=np.int32)}, path / "model.safetensors")
    return path
