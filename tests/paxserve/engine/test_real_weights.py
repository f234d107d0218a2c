"""Real weights from GGUF files against transformers in float32 on the same weights."""

import json

import pytest

from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from tests.engine_driver import GOLDENS, request, run
from tests.gemma_gguf import fetch_gemma

TOLERANCE = 1e-3


def check_greedy_paths(model: str, golden: str) -> None:
    """Twenty paths of 64 tokens and the log-probability of each."""
    flags = {"max_num_seqs": 16, "max_model_len": 512, "compile_sizes": [16], "max_num_batched_tokens": 256}
    core = EngineCore(EngineConfig.from_flags(model=model, **flags))
    paths = json.loads((GOLDENS / "real" / golden).read_text())["greedy"]
    assert len(paths) == 20
    requests = [request(str(i), path["prompt_ids"], max_tokens=64, logprobs=0) for i, path in enumerate(paths)]
    results = run(core, requests)
    for i, path in enumerate(paths):
        result = results[str(i), 0]
        assert result.token_ids == path["greedy_ids"]
        for entry, expected in zip(result.logprobs, path["logprobs"], strict=True):
            assert abs(entry.logprobs[0] - expected) < TOLERANCE


@pytest.mark.e2e
def test_smollm2():
    check_greedy_paths("smollm2-135m-instruct", "smollm2-135m-instruct.json")


@pytest.mark.slow
def test_gemma3(tmp_path):
    check_greedy_paths(str(fetch_gemma(tmp_path)), "gemma-3-270m.json")
