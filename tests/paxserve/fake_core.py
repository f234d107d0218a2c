"""An engine core that follows a script instead of a model: what the server's tests put behind its sockets.

Each choice says `SCRIPT` from the beginning, a token a step, over and over. Prompts that contain the words below
make it fail in the ways that a core can fail.
"""

import os
import time
from dataclasses import dataclass, field
from typing import Any

from paxserve.config import EngineConfig
from paxserve.errors import ConfigError, RequestError
from paxserve.messages import EngineOutput, EngineRequest, EngineStats, ModelInfo, TokenLogprobs
from tests.small_tokenizers import byte_level_tokenizer

SCRIPT = "One two three, café 😀! "
CRASH, VANISH, REFUSE = "please crash", "please vanish", "please refuse"
MAX_MODEL_LEN = 512
NUM_PAGES = 100


@dataclass
class _Choice:
    request: EngineRequest
    index: int
    num_tokens: int = 0
    first_scheduled_time: float = 0.0
    is_aborted: bool = field(default=False)


class FakeCore:
    """The interface of `EngineCore`, without one."""

    def __init__(self, config: EngineConfig) -> None:
        if config.model.model.endswith("broken"):
            raise ConfigError("The checkpoint is broken: expected a model, got nothing.")
        if config.model.model.endswith("buggy"):
            raise ZeroDivisionError("a bug in the engine")
        time.sleep(float(os.environ.get("FAKE_CORE_START_SECONDS", 0)))
        self.step_seconds = float(os.environ.get("FAKE_CORE_STEP_SECONDS", 0.001))
        tokenizer = byte_level_tokenizer()
        self.tokenizer = tokenizer
        self.script = tokenizer.encode(SCRIPT, add_special_tokens=False)
        self.choices: dict[tuple[str, int], _Choice] = {}
        self.counters = EngineStats(num_pages=NUM_PAGES, num_programs=3)
        self.resets = 0
        self.is_asleep = self.is_profiling = False
        self.model_info = ModelInfo(
            max_model_len=MAX_MODEL_LEN,
            max_sequence_tokens=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            num_pages=NUM_PAGES,
            page_size=16,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            eos_token_ids=[],
            generation_config={},
            dtype="float32",
            num_programs=3,
            startup_seconds={},
        )

    def add_request(self, request: EngineRequest) -> None:
        text = self.tokenizer.decode(request.prompt_token_ids)
        if REFUSE in text:
            raise RequestError("This prompt can never run.", "input_tokens")
        if VANISH in text:
            os._exit(3)
        for index in range(request.params.n):
            self.choices[request.request_id, index] = _Choice(request, index)
        self.counters.prompt_tokens += len(request.prompt_token_ids)

    def abort_requests(self, keys: list[tuple[str, int | None]]) -> None:
        for request_id, index in keys:
            for key in list(self.choices):
                if key[0] == request_id and index in (None, key[1]):
                    del self.choices[key]

    def has_unfinished_requests(self) -> bool:
        return bool(self.choices)

    def step(self) -> list[EngineOutput]:
        time.sleep(self.step_seconds)
        self.counters.num_steps += 1
        self.counters.last_step_tokens = len(self.choices)
        return [self.advance(key, choice) for key, choice in list(self.choices.items())]

    def advance(self, key: tuple[str, int], choice: _Choice) -> EngineOutput:
        request, params = choice.request, choice.request.params
        if CRASH in self.tokenizer.decode(request.prompt_token_ids):
            raise RuntimeError("the device is on fire")
        choice.first_scheduled_time = choice.first_scheduled_time or time.time()
        token = self.script[choice.num_tokens % len(self.script)]
        choice.num_tokens += 1
        self.counters.generation_tokens += 1
        output = EngineOutput(
            request_id=request.request_id,
            index=choice.index,
            new_token_ids=[token],
            first_scheduled_time=choice.first_scheduled_time,
            num_cached_tokens=16 if request.cache_salt == "warm" else 0,
        )
        if params.logprobs is not None:
            output.logprobs = [self.logprobs(token, params.logprobs)]
        if params.prompt_logprobs is not None and choice.num_tokens == 1 and choice.index == 0:
            ids = request.prompt_token_ids
            output.prompt_logprobs = [None, *(self.logprobs(i, params.prompt_logprobs) for i in ids[1:])]
        if token in params.all_stop_token_ids and choice.num_tokens > params.min_tokens:
            output.finish_reason, output.stop_reason = "stop", token
        elif params.max_tokens is not None and choice.num_tokens >= params.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason:
            del self.choices[key]
        return output

    def logprobs(self, token: int, count: int) -> TokenLogprobs:
        top = [token, *(rival for rival in range(10, 10 + count) if rival != token)][:count]
        return TokenLogprobs([token, *top], [-0.5, *(-0.5 - place for place in range(len(top)))], 1)

    def stats(self) -> EngineStats:
        stats: Any = self.counters
        stats.num_running = len(self.choices)
        stats.num_pages_in_use = min(NUM_PAGES, len(self.choices))
        return stats

    def sleep(self) -> bool:
        self.is_asleep = not self.choices
        return self.is_asleep

    def discard(self) -> bool:
        return self.sleep()

    def wake_up(self) -> bool:
        was_asleep, self.is_asleep = self.is_asleep, False
        return was_asleep

    def start_profile(self) -> bool:
        was_on, self.is_profiling = self.is_profiling, True
        return not was_on

    def stop_profile(self) -> bool:
        was_on, self.is_profiling = self.is_profiling, False
        return was_on

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return not self.choices

    def check_integrity(self) -> None:
        assert all(choice.num_tokens >= 0 for choice in self.choices.values())
