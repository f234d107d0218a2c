"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Where a stop string was found, in the text that the finder holds."""

    stop: str
    start: int
    end: int


class StopFinder:
    """Passes text on, except an end that may yet become a stop string, and says when one is complete.

    Works character by character (Knuth-Morris-Pratt), so that the answer does not depend on how the text was
    cut into tokens: the match that ends first wins, and of those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(dict.fromkeys(stops))
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self.held = ""

    def feed(self, text: str, *, is_armed: bool = True) -> tuple[str, StopMatch | None]:
        """Text that can be passed on, and the match if one is complete (then the rest stays in `held`).

        While not armed a stop string passes as ordinary text, yet its beginning still counts for later.
        """
        if not self.held and self._first_chars.isdisjoint(text):
            return text, None
        before = len(self.held)
        self.held += text
        for place, char in enumerate(text, start=before + 1):
            length = self._advance(char, is_armed)
            if length:
                start = place - length
                return "", StopMatch(self.held[start:place], start, place)
        free = len(self.held) - max(self._matched, default=0)
        passed, self.held = self.held[:free], self.held[free:]
        return passed, None

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self.held = self.held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str, is_armed: bool) -> int:
        """Move every stop string's state by one character; the length of the longest one that is complete."""
        longest = 0
        for place, stop in enumerate(self._stops):
            failure, matched = self._failures[place], self._matched[place]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                longest = max(longest, matched if is_armed else 0)
                matched = failure[matched - 1]
            self._matched[place] = matched
        return longest


def _failure_function(stop: str) -> list[int]:
    """For each prefix the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(stop)
    matched = 0
    for place in range(1, len(stop)):
        while matched and stop[place] != stop[matched]:
            matched = failure[matched - 1]
        matched += stop[place] == stop[matched]
        failure[place] = matched
    return failure
