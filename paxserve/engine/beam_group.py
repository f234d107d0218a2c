"""The requests that are the beams of one search, and what they have reported."""

import dataclasses

from paxserve.engine.beam_search import BeamSearch, Continuation
from paxserve.engine.request import Request
from paxserve.messages import EngineOutput, EngineRequest, TokenLogprobs


class BeamGroup:
    """The beams of one search, which goes on when every one of them has reported its candidates."""

    def __init__(self, root: Request, search: BeamSearch, num_logprobs: int | None = None) -> None:
        """`num_logprobs` is how many of the likeliest tokens the outputs tell at each place; None is nothing."""
        self.root = root
        self.search = search
        self._num_logprobs = num_logprobs
        self._entries: dict[Request, list[TokenLogprobs]] = {root: []}
        self.beams = [root]
        """The beams in order of their log-probability; none when the search is over."""
        self._reports: dict[Request, TokenLogprobs] = {}
        self._num_made = 1
        self._num_preemptions = 0

    @property
    def width(self) -> int:
        """Sequences that the search will answer with."""
        return self.search.params.beam_width

    def report(self, beam: Request, candidates: TokenLogprobs) -> bool:
        """Take in one beam's candidates, which then waits for the others'; whether all are there now."""
        beam.is_held = True
        self._reports[beam] = candidates
        return len(self._reports) == len(self.beams)

    def advance(self) -> tuple[list[Request], list[tuple[Request, Request]]]:
        """Choose the beams that go on, each with its next token.

        Returns those that end, and (parent, child) of those that are new, which have no pages yet.
        """
        chosen = self.search.advance(
            [beam.output_token_ids for beam in self.beams], [self._reports[beam] for beam in self.beams]
        )
        entries = self._entries_after(chosen)
        self._reports.clear()
        parents = [self.beams[continuation.beam] for continuation in chosen]
        ended = [beam for beam in self.beams if beam not in parents]
        self._num_preemptions += sum(beam.num_preemptions for beam in ended)
        forks: list[tuple[Request, Request]] = []
        beams: list[Request] = []
        for parent in parents:
            beam = parent
            if parent in beams:
                beam = parent.copy(self._num_made)
                self._num_made += 1
                forks.append((parent, beam))
            beams.append(beam)
        for beam, continuation in zip(beams, chosen, strict=True):
            beam.token_ids.append(continuation.token)
            beam.is_held = False
        self.beams = beams
        self._entries = dict(zip(beams, entries, strict=True))
        return ended, forks

    def _entries_after(self, chosen: list[Continuation]) -> list[list[TokenLogprobs]]:
        """What the next beams' outputs will tell of their tokens; new hypotheses get theirs."""

        def extended(step: Continuation) -> list[TokenLogprobs]:
            beam, count = self.beams[step.beam], self._num_logprobs
            if count is None:
                return []
            found = self._reports[beam]
            stop = None if count == -1 else 1 + count
            logprobs = [found.logprobs[step.rank], *found.logprobs[1:stop]]
            return [*self._entries[beam], TokenLogprobs([step.token, *found.token_ids[1:stop]], logprobs, step.rank)]

        for hypothesis in self.search.hypotheses:
            if hypothesis.entries is None:
                hypothesis.entries = extended(hypothesis.last)
        return [extended(step) for step in chosen]

    def outputs(self) -> list[EngineOutput]:
        """What the caller hears in the end: the best complete sequence as choice 0, and so on."""
        root, outputs = self.root, []
        for index, hypothesis in enumerate(self.search.hypotheses):
            last, is_ended = hypothesis.token_ids[-1], hypothesis.ends_by_token
            output = EngineOutput(
                request_id=root.request_id,
                index=index,
                new_token_ids=hypothesis.token_ids,
                logprobs=hypothesis.entries or None,
                finish_reason="stop" if is_ended else "length",
                stop_reason=last if is_ended and last in root.params.stop_token_ids else None,
                num_cached_tokens=root.num_cached_tokens,
                first_scheduled_time=root.first_scheduled_time,
                num_preemptions=0 if index else self._num_preemptions,
                cumulative_logprob=hypothesis.logprob,
            )
            outputs.append(output)
        return outputs


def first_beam(source: EngineRequest, arrival: int, max_sequence_tokens: int) -> Request:
    """The beam that a search begins with: the prompt alone."""
    params = source.beam_search
    assert params is not None
    root = Request(source, seed=0, arrival=arrival)
    # The last token needs no page.
    most = max_sequence_tokens + 1 - root.prompt_len
    search = BeamSearch(params, root.stop_token_ids, min(source.params.max_tokens or most, most))
    # What a step samples is not used, only the most likely tokens that it finds.
    wanted = source.params.logprobs
    most_wanted = -1 if wanted == -1 else max(search.num_candidates, wanted or 0)
    root.params = dataclasses.replace(source.params, logprobs=most_wanted)
    root.needs_host_tokens = True
    root.group = BeamGroup(root, search, wanted)
    return root
