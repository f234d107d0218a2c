"""How long weights take to load, and what the host needs for it beyond them, on a checkpoint of a given size."""

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from paxserve.bench.process_memory import status_bytes
from paxserve.config import ModelConfig
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.loaders.weights import choose_architecture, load_model

SHARD_BYTES = 512 * 2**20
SAMPLE_SECONDS = 0.01
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip
"""Of the checkpoint that is made: Qwen3-1.7B's layers, as many as the size asks for."""


def write_checkpoint(folder: Path, num_bytes: int) -> int:
    """A sharded bfloat16 checkpoint of about that size, full of random numbers; the bytes that it has."""
    table = {"model.embed_tokens.weight": (SHAPE["vocab_size"], SHAPE["hidden_size"])}
    layer = _layer_shapes()
    layer_bytes = 2 * sum(int(np.prod(shape)) for shape in layer.values())
    num_layers = max(1, round((num_bytes - 2 * int(np.prod(table["model.embed_tokens.weight"]))) / layer_bytes))
    shapes = table | {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in layer.items()}
    shapes["model.norm.weight"] = (SHAPE["hidden_size"],)
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    total = 0
    for name, shape in shapes.items():
        shard[name] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        total += shard[name].nbytes
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES or name == "model.norm.weight":
            file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def _layer_shapes() -> dict[str, tuple[int, ...]]:
    size, mlp, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * dim, SHAPE["num_key_value_heads"] * dim
    return {
        "input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (queries, size), "self_attn.k_proj.weight": (keys, size),
        "self_attn.v_proj.weight": (keys, size), "self_attn.o_proj.weight": (size, queries),
        "self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (mlp, size), "mlp.up_proj.weight": (mlp, size), "mlp.down_proj.weight": (size, mlp),
    }  # fmt: skip


def measure_load(settings: ModelConfig, *, dtype: str, layer_execution: str) -> dict[str, Any]:
    """Seconds to load the model's weights, their bytes, and the most that the host held beyond them.

    Memory is the process's own (anonymous): pages of files that are mapped belong to the system, which takes them back.
    """
    jax.block_until_ready(jnp.zeros(()))
    before = status_bytes(os.getpid(), "RssAnon")
    peak, is_done = [before], threading.Event()

    def watch() -> None:
        while not is_done.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], status_bytes(os.getpid(), "RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    try:
        checkpoint = open_checkpoint(settings)
        architecture, config = choose_architecture(checkpoint)
        model = load_model(architecture, config, checkpoint, dtype=jnp.dtype(dtype), layer_execution=layer_execution)
        leaves = jax.block_until_ready(jax.tree.leaves(model))
        seconds = time.perf_counter() - started
    finally:
        is_done.set()
        watcher.join()
    weights = sum(leaf.nbytes for leaf in leaves)
    return {"seconds": seconds, "weight_bytes": weights, "extra_bytes": max(0, peak[0] - before - weights)}


def scratch_folder(parent: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A folder for the checkpoint, removed afterwards."""
    return tempfile.TemporaryDirectory(prefix="paxserve-loading-", dir=parent)
