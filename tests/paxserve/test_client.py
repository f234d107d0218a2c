"""The small things that our clients of a server share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxserve import client
from paxserve.errors import ConfigError


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_an_address_may_end_in_v1(url):
    assert client.server_root(url) == "http://host:1"


@pytest.mark.parametrize("url", ["host:1", "localhost", "", "ftp://host", "http://"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="must be like http://"):
        client.server_root(url)


def test_a_server_on_this_machine_is_reached_without_a_proxy():
    assert client.client_options("http://127.0.0.1:1", None) == {"headers": {}, "timeout": None, "trust_env": False}
    away = client.client_options("https://host", "key", timeout=3.0)
    assert away == {"headers": {"Authorization": "Bearer key"}, "timeout": 3.0, "trust_env": True}


@given(data=st.binary(), cuts=st.lists(st.integers(0, 100), max_size=5))
def test_lines_are_the_same_however_they_are_cut(data, cuts):
    splitter, borders = client.LineSplitter(), [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert lines == data.split(b"\n")[:-1]


def test_events():
    assert client.parse_event(b'data: {"a": "\xe2\x80\xa8"}\r') == {"a": "\u2028"}
    assert client.parse_event('data:{"a": 1}') == {"a": 1}
    assert client.parse_event("data: [DONE]") is client.parse_event("") is client.parse_event(": ping") is None
    splitter = client.LineSplitter()
    (line,) = splitter.feed('data: {"a": "x\u2028y"}\n'.encode())
    assert client.parse_event(line) == {"a": "x\u2028y"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"error": {"message": "Too long.", "code": 400}}', "Too long."),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Not Found"}', "{'detail': 'Not Found'}"),
        ('{"message": "Old style."}', "Old style."),
        (b"<html>Bad gateway</html>", "<html>Bad gateway</html>"),
        (b"\xff", "\ufffd"),
        ("", "no details"),
    ],
)
def test_what_went_wrong_is_found_in_any_shape(body, text):
    assert client.error_text(body) == text
