"""The conversation in the terminal: commands, memory, streaming from a server, refusals."""

import argparse
import io
import json
import sys

import httpx
import pytest

from paxserve.commands import chat
from paxserve.errors import ConfigError, RequestError
from paxserve.flags import FlagParser


def arguments_of(*words: str) -> argparse.Namespace:
    parser = FlagParser(prog="chat")
    chat.add_arguments(parser)
    return parser.parse_args(words)


def talk(answer, lines: str, monkeypatch, system: str | None = None) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return chat.converse(answer, system)


def test_the_conversation_is_remembered_until_reset(monkeypatch, capsys):
    heard = []

    def answer(messages):
        heard.append([(m["role"], m["content"]) for m in messages])
        yield from ("An", "swer")

    assert talk(answer, "one\ntwo\n\n/reset\nthree\n/what\n/exit\nfour\n", monkeypatch, system="Be brief.") == 0
    begin = ("system", "Be brief.")
    assert heard == [
        [begin, ("user", "one")],
        [begin, ("user", "one"), ("assistant", "Answer"), ("user", "two")],
        [begin, ("user", "three")],
    ]
    printed = capsys.readouterr()
    assert printed.out == "Answer\n" * 3
    assert "/reset and /exit" in printed.err


def test_a_refused_question_is_forgotten(monkeypatch, capsys):
    heard = []

    def answer(messages):
        heard.append(len(messages))
        if len(heard) == 1:
            raise RequestError("Too long.")
        yield "Yes"

    talk(answer, "one\ntwo\n", monkeypatch)
    assert heard == [1, 1]
    assert "refused: Too long." in capsys.readouterr().err


def test_ctrl_c_ends_one_answer_and_keeps_what_came(monkeypatch, capsys):
    heard, closed = [], []

    def answer(messages):
        heard.append([m["content"] for m in messages])
        try:
            yield "Part"
            if len(heard) == 1:
                raise KeyboardInterrupt
        finally:
            closed.append(True)

    talk(answer, "one\ntwo\n", monkeypatch)
    assert heard == [["one"], ["one", "Part", "two"]]
    assert closed == [True, True]


@pytest.fixture
def server(monkeypatch):
    """A server's answers, by path; what it was asked is in the list that comes with them."""
    asked: list[httpx.Request] = []
    deltas = [{"role": "assistant"}, {"content": "Hi"}]
    stream = b"".join(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n" for delta in deltas)
    answers = {
        "/v1/models": httpx.Response(200, json={"data": [{"id": "tiny"}]}),
        "/v1/chat/completions": httpx.Response(200, content=stream + b"data: [DONE]\n\n"),
    }

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[request.url.path]

    real = httpx.Client
    transport = httpx.MockTransport(handle)
    monkeypatch.setattr(httpx, "Client", lambda **options: real(transport=transport, **options))
    monkeypatch.setattr(httpx, "get", lambda url, **options: real(transport=transport, **options).get(url))
    return answers, asked


def test_replies_of_a_server_are_streamed(server, monkeypatch):
    monkeypatch.setenv("PAXSERVE_API_KEY", "secret")
    answer = chat.remote_answer(arguments_of("--url", "http://127.0.0.1:1/v1/", "--temperature", "0.5", "--stop", "x"))
    assert "".join(answer([{"role": "user", "content": "Hello"}])) == "Hi"
    _, asked = server
    body = json.loads(asked[-1].content)
    assert (body["model"], body["temperature"], body["stop"], body["stream"]) == ("tiny", 0.5, ["x"], True)
    assert asked[-1].headers["Authorization"] == "Bearer secret"


def test_errors_of_a_server_are_told(server):
    answers, _ = server
    answer = chat.remote_answer(arguments_of("--url", "http://127.0.0.1:1", "--model", "other"))
    answers["/v1/chat/completions"] = httpx.Response(404, json={"error": {"message": "No such model."}})
    with pytest.raises(RequestError, match="No such model"):
        list(answer([]))
    answers["/v1/chat/completions"] = httpx.Response(
        200, content=b'data: {"error": {"message": "The engine died."}}\n\n'
    )
    with pytest.raises(RequestError, match="The engine died"):
        list(answer([]))


def test_engine_flags_do_not_go_with_a_server(server):
    with pytest.raises(ConfigError, match="--max-num-seqs is the engine's"):
        chat.remote_answer(arguments_of("--url", "http://127.0.0.1:1", "--max-num-seqs", "4"))
    with pytest.raises(ConfigError, match="must be like http"):
        chat.remote_answer(arguments_of("--url", "127.0.0.1:1"))


def test_a_model_or_a_server_is_needed():
    with pytest.raises(ConfigError, match="Which model"):
        chat.run(arguments_of())
