"""Perplexity against the checkpoint's reference logits; texts cut into windows."""

import json
import math

import numpy as np
import pytest

from paxserve import cli
from paxserve.bench import perplexity
from paxserve.errors import ConfigError
from paxserve.llm import LLM
from tests.engine_driver import GOLDENS, golden_data, log_softmax


@pytest.fixture(scope="module")
def llm():
    return LLM(
        str(GOLDENS / "llama"),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        compile_sizes=[4],
    )


def test_equals_the_reference(llm, tmp_path, capsys, monkeypatch):
    data = golden_data("llama")
    prompts = [data[f"prompt_{i}"].tolist() for i in range(3)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    monkeypatch.setattr(perplexity, "LLM", lambda **flags: llm)
    assert cli.main(["bench", "perplexity", str(file), "--model", "m", "--context-len", "120"]) == 0
    result = json.loads(capsys.readouterr().out)
    losses = np.concatenate([
        -log_softmax(data[f"logits_{i}"])[np.arange(len(prompt) - 1), prompt[1:]] for i, prompt in enumerate(prompts)
    ])  # fmt: skip
    assert result["num_tokens"] == len(losses)
    assert result["nats_per_token"] == pytest.approx(losses.mean(), abs=1e-4)
    assert result["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    assert result["standard_error"] == pytest.approx(losses.std() / len(losses) ** 0.5, rel=1e-3)


def test_windows(llm):
    ids = list(range(3, 20))
    assert perplexity.windows(llm, [ids], 8, None) == [ids[:8], ids[8:16]]  # a last token alone predicts nothing
    assert perplexity.windows(llm, [ids[:5], ids], 8, 9) == [ids[:5], ids[:4]]
    with pytest.raises(ConfigError, match="--context-len must be at least 2, got 1"):
        perplexity.windows(llm, [ids], 1, None)
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        perplexity.windows(llm, [[4]], 8, None)


def test_texts_are_read_or_refused(tmp_path):
    (tmp_path / "a.txt").write_text("Once upon a time")
    assert perplexity.read_texts(tmp_path / "a.txt") == ["Once upon a time"]
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(ConfigError, match=r"b\.txt is empty"):
        perplexity.read_texts(tmp_path / "b.txt")
    with pytest.raises(ConfigError, match="Cannot read the text"):
        perplexity.read_texts(tmp_path / "c.txt")
