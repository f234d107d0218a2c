"""The first token of a long prompt that is new, on the device, in host memory, on disk: how long it takes each time."""

import contextlib
import gc
import time
from typing import Any

import numpy as np

from paxserve.config import EngineConfig
from paxserve.engine.engine_core import EngineCore
from paxserve.errors import ConfigError
from paxserve.messages import EngineRequest
from paxserve.sampling_params import SamplingParams

FIRST_TOKEN_ID, LAST_TOKEN_ID = 3, 1000
PLACES = ("recompute", "host", "disk", "device")
"""Where the prompt's pages come from."""


def measure_offload(flags: dict[str, Any], prompt_len: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt of `prompt_len` tokens by where its pages are, medians over rounds.

    A round has all of them, one after another, and a prompt of its own. `flags` must give host memory and a folder
    with room for the pages, else `ConfigError`.
    """
    core = EngineCore(EngineConfig.from_flags(**flags | {"max_num_seqs": 1}))
    pool = core.scheduler.pool
    assert pool.disk is not None
    core.runner.wait_for_programs()
    bench = _Bench(core, prompt_len)
    with contextlib.closing(pool.disk):
        if prompt_len + 1 > core.model_info.max_sequence_tokens:
            raise ConfigError(f"The prompt of {prompt_len} tokens is longer than the model's or the KV pool's limit.")
        bench.one_round()  # whatever is slow once only
        runs = [bench.one_round() for _ in range(rounds)]
    del core, bench
    gc.collect()
    medians = {place: float(np.median([run[place] for run in runs])) for place in PLACES}
    return {
        "prompt_len": prompt_len,
        "rounds": rounds,
        **{f"{place}_ms": round(1000 * seconds, 3) for place, seconds in medians.items()},
        **{f"{place}_to_device": round(medians[place] / medians["device"], 2) for place in PLACES[:-1]},
    }


class _Bench:
    """One engine, and prompts that it has not seen."""

    def __init__(self, core: EngineCore, prompt_len: int) -> None:
        self.core = core
        self.prompt_len = prompt_len
        self._pool = core.scheduler.pool
        self._num_requests = 0
        self._num_prompts = 0

    def one_round(self) -> dict[str, float]:
        """Seconds to the first token, by place."""
        prompt, page_size = self._new_prompt(), self._pool.page_size
        num_pages = (self.prompt_len - 1) // page_size
        answers = {"recompute": self._ask(prompt, 0), "device": self._ask(prompt, num_pages * page_size)}
        # Others take every page of the pool, so that this prompt's go to host memory and, from there, to disk.
        for _ in range(-(-self._pool.num_pages // num_pages)):
            self._ask(self._new_prompt(), 0)
        answers["host"] = self._ask_elsewhere(prompt, num_pages)
        self._forget_all_but_disk()
        answers["disk"] = self._ask_elsewhere(prompt, num_pages)
        tokens = {place: token for place, (_, token) in answers.items()}
        assert len(set(tokens.values())) == 1, f"the answer depends on where the pages are: {tokens}"
        return {place: seconds for place, (seconds, _) in answers.items()}

    def _ask_elsewhere(self, prompt: list[int], num_pages: int) -> tuple[float, int]:
        """The same, of a prompt that is not on the device."""
        known, before = num_pages * self._pool.page_size, self.core.stats().offloaded_hits
        answer = self._ask(prompt, known)
        assert self.core.stats().offloaded_hits == before + known
        return answer

    def _new_prompt(self) -> list[int]:
        self._num_prompts += 1
        rng = np.random.default_rng([self._num_prompts, self.prompt_len])
        return rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, self.prompt_len).tolist()

    def _forget_all_but_disk(self) -> None:
        """As after a restart, but that the files may still be in the system's cache."""
        assert self._pool.disk is not None
        self._pool.disk.flush()
        assert self.core.scheduler.reset_prefix_cache(keeps_disk=True)

    def _ask(self, prompt: list[int], known: int) -> tuple[float, int]:
        """Seconds to the first token, and the token; `known` tokens of the prompt need not be computed."""
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = EngineRequest(
            request_id=str(self._num_requests), prompt_token_ids=prompt, params=params, arrival_time=time.time()
        )
        begin = time.perf_counter()
        self.core.add_request(request)
        found = None
        while self.core.has_unfinished_requests():
            for output in self.core.step():
                found = time.perf_counter() - begin, output
        assert found is not None
        seconds, output = found
        if output.num_cached_tokens != known:
            raise ConfigError(
                f"{output.num_cached_tokens} of {known} tokens were found again: raise kv_offloading_size or "
                "kv_offloading_disk_size, or shorten the prompt."
            )
        return seconds, output.new_token_ids[0]
