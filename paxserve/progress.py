"""The progress bar of offline runs."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tqdm.auto import tqdm

SHOW_SECONDS = 0.5
"""How often the rates are brought up to date while nothing ends."""


class Finished(Protocol):
    """What the bar must know of a request that has ended."""

    prompt_token_ids: list[int]


class Progress:
    """A bar of finished requests with tokens a second, or nothing at all."""

    def __init__(self, count: int, use_tqdm: bool | Callable[..., tqdm]) -> None:
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        self.bar = make_bar(total=count, desc="Processed prompts", dynamic_ncols=True) if use_tqdm else None
        self.started = self.shown = time.perf_counter()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0

    def note(self, num_new_tokens: int, done: Sequence[Finished]) -> None:
        """Count what a step brought."""
        if self.bar is None:
            return
        now = time.perf_counter()
        self.num_output_tokens += num_new_tokens
        self.num_prompt_tokens += sum(len(output.prompt_token_ids) for output in done)
        if done or now - self.shown > SHOW_SECONDS:
            self.shown = now
            seconds = max(now - self.started, 1e-9)
            rates = f"{self.num_prompt_tokens / seconds:.1f}, output: {self.num_output_tokens / seconds:.1f}"
            self.bar.set_postfix_str(f"toks/s input: {rates}", refresh=not done)
            self.bar.update(len(done))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
