import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve.engine.stop_strings import StopFinder

SHORT_TEXT = st.text("ab", max_size=12)


def feed_all(stops, pieces):
    """What is passed on, and the match with the piece that completed it."""
    finder, passed = StopFinder(stops), ""
    for place, piece in enumerate(pieces):
        text, match = finder.feed(piece)
        passed += text
        if match:
            return passed + finder.held[: match.start], match.stop, place
    return passed + finder.flush(), None, None


def first_match(stops, text):
    """The oracle: grow the text character by character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(SHORT_TEXT, max_size=8))
def test_pieces_are_as_one_text(stops, pieces):
    text, stop, _ = feed_all(stops, pieces)
    assert (text, stop) == first_match(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.lists(SHORT_TEXT, max_size=8))
def test_held_is_the_longest_possible_beginning(stops, pieces):
    finder, seen = StopFinder(stops), ""
    for piece in pieces:
        _, match = finder.feed(piece)
        seen += piece
        if match:
            return
        possible = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops)]
        assert finder.held == seen[len(seen) - max(possible) :]


def test_nothing_is_held_of_ordinary_text():
    finder = StopFinder(["STOP"])
    assert finder.feed("hello ") == ("hello ", None)
    assert finder.held == ""
    assert finder.feed("to S") == ("to ", None)
    assert finder.held == "S"


def test_unarmed_stop_passes_but_its_beginning_counts():
    finder = StopFinder(["abab"])
    assert finder.feed("xabab", is_armed=False) == ("xab", None)
    text, match = finder.feed("ab")
    assert text == ""
    assert match is not None
    assert finder.held[: match.start] == ""
    assert finder.held[match.start : match.end] == "abab"


@pytest.mark.parametrize("pieces", [["abc"], ["a", "b", "c"], ["ab", "c"]])
def test_the_match_that_ends_first_wins_however_the_text_is_cut(pieces):
    assert feed_all(["abc", "b"], pieces)[:2] == ("a", "b")


def test_long_stop_strings_cost_no_more_than_their_text():
    stop = "a" * 5000 + "b"
    finder = StopFinder([stop])
    passed = ""
    for _ in range(20000):
        text, match = finder.feed("a")
        passed += text
        assert match is None
    assert passed + finder.held == "a" * 20000
    assert len(finder.held) == 5000
