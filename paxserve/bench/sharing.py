"""What sharing pages saves when a prompt has several outputs: the real scheduler and page pool, tokens at random."""

from typing import Any

import numpy as np

from paxserve.beam_search_params import BeamSearchParams
from paxserve.bench.trace import Lengths, TraceRequest, draw_trace
from paxserve.engine.beam_group import first_beam
from paxserve.engine.decode_steps import DecodeStep
from paxserve.engine.kv_cache import PagePool
from paxserve.engine.request import Request, expand_choices
from paxserve.engine.scheduler import Scheduler
from paxserve.engine.step_plan import RowResult, ScheduledStep
from paxserve.messages import EngineRequest, TokenLogprobs
from paxserve.sampling_params import SamplingParams

AT_ONCE = 8
"""Requests that run together; they share nothing with each other, so that it hardly matters how many."""

OUTPUT_TOKEN = 7
SURE_SHARE = 0.5
"""Share of places at which a beam's next token is almost certain."""
EXPONENTS = (1.2, 4.0)
"""The k-th likeliest token has a probability in proportion to 1 / k to this power: where unsure, and where sure."""


class _Tokens:
    """Answers in the device's place."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def results(self, step: ScheduledStep | DecodeStep) -> Any:
        """What the scheduler takes in."""
        if isinstance(step, DecodeStep):
            return np.full((1, step.num_rows), OUTPUT_TOKEN)
        return [RowResult(OUTPUT_TOKEN, self._candidates(row.request.params.logprobs)) for row in step.rows]

    def _candidates(self, count: int | None) -> TokenLogprobs | None:
        if not count:
            return None
        # Of a hundred tokens; their order is that of their numbers.
        exponent = EXPONENTS[int(self._rng.random() < SURE_SHARE)]
        logprobs = -exponent * np.log(np.arange(1, 101))
        logprobs -= np.log(np.exp(logprobs).sum())
        return TokenLogprobs([OUTPUT_TOKEN, *range(count)], [0.0, *logprobs[:count].tolist()], 1)


def measure_sharing(
    lengths: Lengths, num_requests: int, num_outputs: int, *, is_beam_search: bool, page_size: int, seed: int
) -> dict[str, Any]:
    """The share of pages that is saved, over all steps, against outputs that each had pages of their own.

    Nothing is shared between requests: there is no prefix cache.
    """
    longest = 2 * lengths.longest
    most = AT_ONCE * num_outputs
    pool = PagePool(most * (-(-longest // page_size) + 1), page_size, enable_prefix_caching=False)
    scheduler = Scheduler(pool, max_num_seqs=most, max_num_batched_tokens=4096, max_model_len=longest)
    for number, source in enumerate(draw_trace(lengths, num_requests, 1.0, seed)):
        scheduler.add(_choices(source, number, num_outputs, scheduler.max_sequence_tokens, is_beam_search))
    tokens, num_held, num_used, num_copies = _Tokens(seed), 0, 0, 0
    while (step := scheduler.schedule()) is not None:
        num_copies += len(step.page_copies)
        num_held += sum(len(request.pages) for request in scheduler.running)
        num_used += pool.num_in_use
        scheduler.update(step, tokens.results(step))
    stats = scheduler.stats()
    assert not scheduler.has_unfinished()
    return {
        "outputs": num_outputs,
        "beam_search": is_beam_search,
        "saved_share": round(1 - num_used / num_held, 4),
        "copied_pages_per_100_tokens": round(100 * num_copies / stats.generation_tokens, 2),
    }


def _choices(
    source: TraceRequest, number: int, num_outputs: int, max_sequence_tokens: int, is_beam_search: bool
) -> list[Request]:
    params = SamplingParams(n=num_outputs, max_tokens=source.output_len, ignore_eos=True)
    request = EngineRequest(
        request_id=str(number), prompt_token_ids=[number] * source.prompt_len, params=params, arrival_time=0.0
    )
    if is_beam_search:
        request.beam_search = BeamSearchParams(beam_width=num_outputs, max_tokens=source.output_len)
        return [first_beam(request, number, max_sequence_tokens)]
    return expand_choices(request, list(range(num_outputs)), number)
