"""Drives an `EngineCore` in the test's own process, checking its invariants after every step."""

import dataclasses
import functools
from pathlib import Path

import numpy as np

from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from paxserve.messages import EngineOutput, EngineRequest
from paxserve.sampling_params import SamplingParams

GOLDENS = Path(__file__).parent / "goldens"


@dataclasses.dataclass
class Finished:
    """What one choice of one request came to."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list | None = None
    last: EngineOutput | None = None

    @property
    def finish_reason(self) -> str | None:
        return self.last.finish_reason if self.last else None


def make_core(golden: str, **flags) -> EngineCore:
    """An engine for one of the golden checkpoints, small enough to compile quickly."""
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "max_logprobs": -1, **flags}
    # Compiling takes nearly all the time of these tests: two sizes, so that a bucket's edge is crossed.
    values.setdefault("compile_sizes", [4])
    return EngineCore(EngineConfig.from_flags(model=str(GOLDENS / golden), **values))


def request(request_id: str, prompt, **params) -> EngineRequest:
    """A greedy request unless told otherwise, with ignore_eos as the goldens were made."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, **params}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[int(token) for token in prompt],
        params=SamplingParams(**params),
        arrival_time=0.0,
    )


def run(core: EngineCore, requests: list[EngineRequest], *, together: bool = True) -> dict[tuple[str, int], Finished]:
    """Run the requests to their end, all at once or one after another."""
    results: dict[tuple[str, int], Finished] = {}
    for batch in [requests] if together else [[r] for r in requests]:
        for r in batch:
            core.add_request(r)
        while core.has_unfinished_requests():
            outputs = core.step()
            core.check_integrity()
            for output in outputs:
                result = results.setdefault((output.request_id, output.index), Finished())
                result.token_ids += output.new_token_ids
                result.logprobs += output.logprobs or []
                result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs
                result.last = output
    stats = core.stats()
    assert stats.num_pages_in_use == 0
    assert stats.recompilations == 0
    return results


@functools.cache
def golden_data(name: str) -> dict[str, np.ndarray]:
    """Prompts, teacher-forced logits and greedy continuations of a golden."""
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        return dict(arrays)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, so that the test's own rounding does not count."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
