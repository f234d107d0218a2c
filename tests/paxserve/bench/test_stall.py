from pathlib import Path

import pytest

from paxserve.bench.stall import measure_stall
from paxserve.errors import ConfigError

FLAGS = {
    "model": str(Path(__file__).parents[2] / "goldens" / "llama"), "max_model_len": 128, "num_gpu_blocks_override": 20,
    "compile_sizes": [2],
}  # fmt: skip


@pytest.mark.parametrize("budget", [16, pytest.param(None, marks=pytest.mark.slow)])
def test_the_longest_gap_lies_between_a_step_and_the_whole_prompt(budget):
    result = measure_stall(FLAGS, budget, prompt_len=90, repeats=1)
    assert result["budget"] == (budget or "off")
    assert 0 < result["gap_before_ms"]
    # Between the arrival and the prompt's token lie at most a dozen gaps: one of them is at least a twentieth.
    assert 0 < result["prompt_ttft_ms"] < 20 * result["longest_gap_ms"]


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="longer than the model's"):
        measure_stall(FLAGS | {"num_gpu_blocks_override": 4}, 16, prompt_len=90, repeats=1)
