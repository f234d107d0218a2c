"""How well the engine predicts a text: what a KV cache, a dtype or a kernel costs in accuracy, as one number."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from paxserve.bench.datasets import read_jsonl
from paxserve.errors import ConfigError
from paxserve.llm import LLM
from paxserve.sampling_params import SamplingParams


def read_texts(path: Path) -> list[str | list[int]]:
    """The texts of a JSONL file's prompts, or of any other file the whole of it."""
    if path.suffix == ".jsonl":
        return [request.prompt for request in read_jsonl(path, default_max_tokens=1)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the text {path}: {error}.") from None
    if not text.strip():
        raise ConfigError(f"The text {path} is empty.")
    return [text]


def windows(llm: LLM, texts: list[str | list[int]], context_len: int, max_tokens: int | None) -> list[list[int]]:
    """The texts' tokens in pieces of up to `context_len`, each behind a begin token where the tokenizer has one."""
    begin: list[int] = []
    pieces: list[list[int]] = []
    if any(isinstance(text, str) for text in texts):
        tokenizer = llm.get_tokenizer()
        begin = tokenizer.encode("", add_special_tokens=True)
        texts = [tokenizer.encode(t, add_special_tokens=False) if isinstance(t, str) else t for t in texts]
    size = context_len - len(begin)
    if size < 2:
        raise ConfigError(f"--context-len must be at least {len(begin) + 2}, got {context_len}.")
    left = max_tokens
    for ids in texts:
        ids = ids[:left]
        left = None if left is None else left - len(ids)
        pieces += [[*begin, *ids[i : i + size]] for i in range(0, len(ids), size) if len(ids) - i > 1]
    if not pieces:
        raise ConfigError("There is nothing to predict: the texts have fewer than two tokens.")
    return pieces


def measure_perplexity(llm: LLM, pieces: list[list[int]]) -> dict[str, Any]:
    """Perplexity over every token but the first of each piece, whose mean and error are in nats a token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in pieces], params, use_tqdm=False)
    losses = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            losses.append(-entry[token].logprob)
    mean = float(np.mean(losses))
    return {
        "perplexity": math.exp(mean),
        "nats_per_token": mean,
        "standard_error": float(np.std(losses) / math.sqrt(len(losses))),
        "num_tokens": len(losses),
        "num_windows": len(pieces),
    }
