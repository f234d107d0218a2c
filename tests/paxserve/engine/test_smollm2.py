"""Real weights: SmolLM2-135M-Instruct from its GGUF against transformers in float32 on the same weights."""

import json

import pytest

from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from tests.engine_driver import GOLDENS, request, run

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-3


def test_greedy_paths_and_their_log_probabilities():
    flags = {"max_num_seqs": 16, "max_model_len": 512, "compile_sizes": [16], "max_num_batched_tokens": 256}
    core = EngineCore(EngineConfig.from_flags(model="smollm2-135m-instruct", **flags))
    paths = json.loads((GOLDENS / "real" / "smollm2-135m-instruct.json").read_text())["greedy"]
    assert len(paths) == 20
    requests = [request(str(i), path["prompt_ids"], max_tokens=64, logprobs=0) for i, path in enumerate(paths)]
    results = run(core, requests)
    for i, path in enumerate(paths):
        result = results[str(i), 0]
        assert result.token_ids == path["greedy_ids"]
        for entry, expected in zip(result.logprobs, path["logprobs"], strict=True):
            assert abs(entry.logprobs[0] - expected) < TOLERANCE
