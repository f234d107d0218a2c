"""How prompts may be computed in parts: in chunks of what size, how many at once, and what short ones are kept."""

from dataclasses import dataclass
from typing import Self

from paxserve.config import SchedulerConfig
from paxserve.engine.request import Request
from paxserve.engine.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """The flags of the same names, settled for one engine."""

    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    """Prompts with more tokens are long, and compute at most so many a step; 0 is no limit."""
    short_prompt_share: float = 0.25
    """Of a step's tokens, for prompts that overtake those that are computed in parts."""

    @classmethod
    def of(cls, config: SchedulerConfig, max_model_len: int) -> Self:
        """What the flags say."""
        return cls(
            enable_chunked_prefill=config.enable_chunked_prefill,
            max_num_partial_prefills=config.max_num_partial_prefills,
            max_long_partial_prefills=config.max_long_partial_prefills,
            long_prefill_token_threshold=config.long_prefill_threshold(max_model_len),
            short_prompt_share=config.short_prompt_share,
        )

    def chunk(self, remaining: int, budget: int) -> int:
        """How many of a request's remaining tokens one step may compute."""
        return min(remaining, budget, self.long_prefill_token_threshold or remaining)

    def share_of(self, budget: int) -> int:
        """Tokens of a step's whole budget that short prompts may take from one computed in parts."""
        return int(budget * self.short_prompt_share) if self.enable_chunked_prefill else 0

    def may_begin(self, request: Request, plan: StepPlan) -> bool:
        """Whether one more prompt may be computed in parts."""
        if plan.num_partial >= self.max_num_partial_prefills:
            return False
        return not self._is_long(request) or plan.num_long_partial < self.max_long_partial_prefills

    def count(self, request: Request, plan: StepPlan) -> None:
        """Note in the plan that the request's prompt stays unfinished after this step."""
        plan.num_partial += 1
        plan.num_long_partial += self._is_long(request)

    def _is_long(self, request: Request) -> bool:
        return 0 < self.long_prefill_token_threshold < request.prompt_len
