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


@dataclass(slots=True)
class Hypothesis:
    """A complete sequence."""

    token_ids: list[int]
    logprob: float
    score: float
    ends_by_token: bool


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
        that was sampled.
        """
        width, num_tokens = self.params.beam_width, len(outputs[0]) + 1
        found = [
            Continuation(beam, token, self.logprobs[beam] + logprob)
            for beam, entry in enumerate(candidates)
            for token, logprob in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
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
        for beam, token, logprob in ended:
            tokens = [*outputs[beam], token]
            score = logprob / len(tokens) ** self.params.length_penalty
            self.hypotheses.append(Hypothesis(tokens, logprob, score, token in self.end_token_ids))
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
