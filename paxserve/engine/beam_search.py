"""Beam search over sequences that the scheduler runs: which of them go on, which are complete, when it is over.

The rules are those of transformers' `generate(num_beams=...)`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from paxserve.beam_search_params import BeamSearchParams
from paxserve.messages import TokenLogprobs


class Continuation(NamedTuple):
    """A beam and the token that it goes on with."""

    beam: int
    token: int
    logprob: float
    """Of the whole sequence."""
    rank: int
    """Of the token among the beam's candidates, 1 being the likeliest."""


@dataclass(slots=True)
class Hypothesis:
    """A complete sequence."""

    token_ids: list[int]
    logprob: float
    score: float
    ends_by_token: bool
    last: Continuation
    """The beam that it was, and what completed it."""
    entries: list[TokenLogprobs] | None = None
    """About each of its tokens, if that is wanted."""


@dataclass
class BeamSearch:
    """The state of one search. Beams are named by their places in the list that `advance` returned last."""

    params: BeamSearchParams
    end_token_ids: set[int]
    max_tokens: int
    logprobs: list[float] = field(default_factory=lambda: [0.0])
    """Of each beam's whole output."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """Complete sequences, the best first."""

    @property
    def num_candidates(self) -> int:
        """How many continuations of each beam `advance` needs, the most likely ones."""
        return self.params.num_candidates(len(self.end_token_ids))

    def advance(self, outputs: list[list[int]], candidates: list[TokenLogprobs]) -> list[Continuation]:
        """The beams that go on, the best first, or none when the search is over.

        `outputs` are the beams' tokens so far; of each beam's candidates the first entry is not one: it is the token
        that was sampled. More than `num_candidates` are not looked at.
        """
        width, num_tokens = self.params.beam_width, len(outputs[0]) + 1
        found = [
            Continuation(beam, token, self.logprobs[beam] + logprob, rank)
            for beam, entry in enumerate(candidates)
            for rank, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True))
            if 0 < rank <= self.num_candidates
        ]
        found.sort(key=lambda continuation: -continuation.logprob)
        is_last = num_tokens >= self.max_tokens
        going_on = [c for c in found if not is_last and c.token not in self.end_token_ids][:width]
        self._complete([c for c in found[:width] if is_last or c.token in self.end_token_ids], outputs)
        self.logprobs = [c.logprob for c in going_on]
        if not going_on or not self._goes_on(num_tokens):
            return []
        return going_on

    def _complete(self, ended: list[Continuation], outputs: list[list[int]]) -> None:
        """Keep the best of the complete sequences and those that end now."""
        width = self.params.beam_width
        if self.params.early_stopping is True and len(self.hypotheses) == width:
            return
        for last in ended:
            tokens = [*outputs[last.beam], last.token]
            score = last.logprob / len(tokens) ** self.params.length_penalty
            self.hypotheses.append(Hypothesis(tokens, last.logprob, score, last.token in self.end_token_ids, last))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[width:]

    def _goes_on(self, num_tokens: int) -> bool:
        """Whether a running beam may still become better than the worst complete sequence."""
        params = self.params
        if len(self.hypotheses) < params.beam_width:
            return True
        is_longest_best = params.early_stopping == "never" and params.length_penalty > 0
        length = self.max_tokens if is_longest_best else num_tokens
        best = self.logprobs[0] / length**params.length_penalty
        return params.early_stopping is not True and best > self.hypotheses[-1].score
