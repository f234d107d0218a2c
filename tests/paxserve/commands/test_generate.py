"""Where prompts come from, and how outputs are printed."""

import argparse
import io
import sys

import pytest

from paxserve.commands import generate
from paxserve.errors import ConfigError
from paxserve.flags import FlagParser


def arguments_of(*words: str) -> argparse.Namespace:
    parser = FlagParser(prog="generate")
    generate.add_arguments(parser)
    return parser.parse_args(words)


def test_prompts_from_arguments_standard_input_and_files(tmp_path, monkeypatch):
    assert generate.read_prompts(arguments_of("one", "two")) == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("several\nlines\n"))
    assert generate.read_prompts(arguments_of()) == ["several\nlines\n"]
    lines, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\ntwo\n")
    assert generate.read_prompts(arguments_of("--file", str(lines))) == ["one", "two"]
    rows.write_text(
        '{"prompt": "one"}\n{"prompt_token_ids": [1, 2]}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    expected = ["one", {"prompt_token_ids": [1, 2]}, [{"role": "user", "content": "x"}]]
    assert generate.read_prompts(arguments_of("--file", str(rows))) == expected


def test_chat_makes_messages():
    assert generate.read_prompts(arguments_of("--chat", "Hi")) == [[{"role": "user", "content": "Hi"}]]


@pytest.mark.parametrize("row", ["{", "[1]", "{}", '{"prompt": 1}', '{"prompt": "a", "temperature": 1}'])
def test_a_bad_row_is_named(row, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1"):
        generate.read_prompts(arguments_of("--file", str(path)))


def test_prompts_that_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="no prompt"):
        generate.read_prompts(arguments_of())
    with pytest.raises(ConfigError, match="not both"):
        generate.read_prompts(arguments_of("one", "--file", "x"))
    with pytest.raises(ConfigError, match="Cannot read"):
        generate.read_prompts(arguments_of("--file", str(tmp_path / "none.txt")))
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    with pytest.raises(ConfigError, match="--chat needs text"):
        generate.read_prompts(arguments_of("--chat", "--file", str(tmp_path / "ids.jsonl")))
