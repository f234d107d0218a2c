"""Makes goldens of decoders: tiny seeded checkpoints, and what transformers computes for them.

Run by hand in an environment with torch 2.13 and transformers 5.19, which paxserve does not need:
`python tests/goldens/make_goldens.py [NAME ...]` writes `tests/goldens/NAME`. Float32, eager attention, from the files
as saved. golden.npz: `prompt_i` token ids, `logits_i` [T, V] of the whole prompt, `greedy_i` twelve tokens, each from a
forward pass of its own.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent
LENGTHS = (7, 40, 90)
NUM_GREEDY = 12
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
    "dtype": "float32",
}
CONFIGS = {
    "arcee": lambda: transformers.ArceeConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "glm": lambda: transformers.GlmConfig(**SIZES, partial_rotary_factor=0.5),
}


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """The model with norms and biases, which begin as ones and zeros, moved a little from there."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make(name: str) -> None:
    folder = FOLDER / name
    torch.manual_seed(sorted(CONFIGS).index(name))
    shaken(transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model.eval()
    (folder / "generation_config.json").unlink(missing_ok=True)
    rng, data, gaps = np.random.default_rng(0), {}, []
    for i, length in enumerate(LENGTHS):
        ids = rng.integers(3, SIZES["vocab_size"], length)
        tokens = torch.tensor(ids)[None]
        with torch.no_grad():
            data[f"logits_{i}"] = model(tokens).logits[0].numpy()
            for _ in range(NUM_GREEDY):
                last = model(tokens).logits[0, -1]
                gaps.append(float(-torch.diff(last.topk(2).values)))
                tokens = torch.cat([tokens, last.argmax()[None, None]], dim=1)
        data[f"prompt_{i}"] = ids.astype(np.int32)
        data[f"greedy_{i}"] = tokens[0, length:].numpy().astype(np.int32)
    np.savez_compressed(folder / "golden.npz", **data)
    print(f"{name}: closest top-two gap {min(gaps):.1e}")


for wanted in sys.argv[1:] or CONFIGS:
    make(wanted)
