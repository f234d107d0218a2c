"""Writes `tests/goldens/beams.json`: what transformers' beam search finds. Needs torch, which paxserve does not.

python tests/beam_reference.py [GGUF FILE OF SMOLLM2]
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

GOLDENS = Path(__file__).parent / "goldens"
TINY = ("llama", "qwen3", "gemma3_text")
SETTINGS = [
    {"beam_width": 2, "length_penalty": 1.0, "early_stopping": False},
    {"beam_width": 4, "length_penalty": 1.0, "early_stopping": True},
    {"beam_width": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 2, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": -1.0, "early_stopping": False},
    {"beam_width": 4, "length_penalty": 0.5, "early_stopping": False},
    {"beam_width": 2, "length_penalty": -0.5, "early_stopping": True},
    {"beam_width": 5, "length_penalty": 1.5, "early_stopping": "never"},
]


def search(model, prompt, max_tokens, ends, setting):
    """One case with its expected sequences (without the prompt) and scores."""
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        num_beams=setting["beam_width"], num_return_sequences=setting["beam_width"], max_new_tokens=max_tokens,
        length_penalty=setting["length_penalty"], early_stopping=setting["early_stopping"], eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(row, 1) if token in ends), len(row))
        sequences.append(row[:end])
    scores = [float(score) for score in found.sequences_scores]
    return {
        "prompt": prompt, "max_tokens": max_tokens, "eos_token_ids": ends, **setting, "sequences": sequences,
        "scores": scores,
    }  # fmt: skip


def cases(model, prompts, max_tokens):
    """Each setting on a prompt: without an end, and ending at tokens that the search meets."""
    model.eval().generation_config.eos_token_id = None
    found = []
    for number, setting in enumerate(SETTINGS):
        prompt = prompts[number % len(prompts)]
        free = search(model, prompt, max_tokens, [], setting)
        met = list(dict.fromkeys(sequence[2 + number % 3] for sequence in free["sequences"]))[:2]
        found += [free, search(model, prompt, max_tokens, met, setting)]
    return found


def main():
    """Write the file anew; SmolLM2's part stays as it is when its file is not given."""
    path = GOLDENS / "beams.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    for name in TINY:
        with np.load(GOLDENS / name / "golden.npz") as arrays:
            prompts = [arrays[f"prompt_{number}"].tolist() for number in range(3)]
        model = AutoModelForCausalLM.from_pretrained(GOLDENS / name, dtype=torch.float32)
        result[name] = cases(model, prompts, 10)
    if len(sys.argv) > 1:
        gguf = Path(sys.argv[1])
        greedy = json.loads((GOLDENS / "real" / "smollm2-135m-instruct.json").read_text())["greedy"]
        prompts = [path["prompt_ids"] for path in greedy[:3]]
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        result["smollm2"] = cases(model, prompts, 24)
    lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, found)) + "]" for name, found in result.items()]
    path.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
