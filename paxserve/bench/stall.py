"""How long a running request is held up by a long prompt that arrives: the longest gap between two of its tokens."""

import gc
import time
from typing import Any

import numpy as np

from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from paxserve.errors import ConfigError
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams

SHORT_PROMPT = 16
WARM_UP_TOKENS = 16
"""Tokens that the running request has made before the long prompt arrives."""

FIRST_TOKEN_ID, LAST_TOKEN_ID = 3, 1000


def measure_stall(flags: dict[str, Any], budget: int | None, prompt_len: int, repeats: int) -> dict[str, Any]:
    """Gaps in milliseconds between the tokens of one request while a prompt of `prompt_len` tokens is computed.

    `budget` is the most tokens of a step; None computes the whole prompt in one.
    """
    if budget is None:
        flags = flags | {"enable_chunked_prefill": False, "max_num_batched_tokens": prompt_len + SHORT_PROMPT}
    else:
        flags = flags | {"max_num_batched_tokens": budget}
    # Two rows are all there is: few sizes to compile, and nothing to find in the prefix cache of the repeats before.
    flags |= {"max_num_seqs": 2, "enable_prefix_caching": False}
    core = EngineCore(EngineConfig.from_flags(**flags))
    if prompt_len + 1 > core.model_info.max_sequence_tokens:
        raise ConfigError(f"The prompt of {prompt_len} tokens is longer than the model's or the KV pool's limit.")
    core.runner.wait_for_programs()
    runs = [_one_arrival(core, prompt_len, seed) for seed in range(repeats)]
    del core
    gc.collect()
    return {
        "budget": budget or "off",
        "longest_gap_ms": float(np.median([max(gaps) for gaps, _, _ in runs])),
        "gap_before_ms": float(np.median([before for _, before, _ in runs])),
        "prompt_ttft_ms": float(np.median([ttft for _, _, ttft in runs])),
    }


def _one_arrival(core: EngineCore, prompt_len: int, seed: int) -> tuple[list[float], float, float]:
    """Gaps from the arrival to the long prompt's first token, the median gap before it, and its time to that token."""
    core.add_request(_request("running", SHORT_PROMPT, core.model_info.max_sequence_tokens, seed))
    times: list[float] = []
    while len(times) < WARM_UP_TOKENS:
        times += [time.perf_counter() for output in core.step() if output.new_token_ids]
    before = float(np.median(np.diff(times[WARM_UP_TOKENS // 2 :])))
    arrival = time.perf_counter()
    core.add_request(_request("long", prompt_len, 1, seed))
    times, first = times[-1:], 0.0
    # One more token after the long prompt's own: the gap that the last of its steps makes ends there.
    while not first or times[-1] <= first:
        for output in core.step():
            now = time.perf_counter()
            if output.request_id == "running":
                times.append(now)
            else:
                first = now
    core.abort_requests([("running", None)])
    while core.has_unfinished_requests():
        core.step()
    return [1000 * float(gap) for gap in np.diff(times)], 1000 * before, 1000 * (first - arrival)


def _request(name: str, length: int, max_tokens: int, seed: int) -> EngineRequest:
    tokens = np.random.default_rng([seed, length]).integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, length).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=tokens, params=params, arrival_time=time.time())
