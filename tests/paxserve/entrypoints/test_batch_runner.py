import json
from pathlib import Path

import pytest

from paxserve.config import EngineConfig
from paxserve.entrypoints.batch_runner import keep_answers, run_batch
from paxserve.errors import ConfigError
from paxserve.server_config import ServerConfig
from tests.paxserve.fake_core import SCRIPT
from tests.small_tokenizers import CHATML, byte_level_tokenizer

CORE = "tests.paxserve.fake_core:FakeCore"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    byte_level_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def line(custom_id: str, url: str = "/v1/completions", **body) -> dict:
    body = body or {"prompt": "Hi", "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def answers(path: Path) -> dict[str, dict]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({entry["custom_id"] for entry in lines}) == len(lines)
    return {entry["custom_id"]: entry for entry in lines}


def run(folder: Path, source: Path, target: Path, **server) -> int:
    return run_batch(EngineConfig.from_flags(model=str(folder)), ServerConfig(**server), source, target, core=CORE)


def test_answers_are_written_and_an_interrupted_run_is_continued(folder, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    write(source, [
        line("a"), line("b", "/v1/chat/completions", messages=messages, max_tokens=5),
        line("c", temperature=9, prompt="x"),
        line("d", prompt="x", stream=True), line("e", "/health"), line("f", prompt="x", model="other"),
    ])  # fmt: skip
    assert run(folder, source, target, api_key=["secret"]) == 1
    first = answers(target)
    assert set(first) == set("abcdef")
    assert first["a"]["response"]["status_code"] == 200
    assert first["a"]["response"]["body"]["choices"][0]["text"] == SCRIPT[:3]
    assert first["b"]["response"]["body"]["choices"][0]["message"]["content"] == SCRIPT[:5]
    assert first["c"]["response"]["status_code"] == 400
    assert first["f"]["response"]["status_code"] == 404
    assert "stream" in first["d"]["error"]["message"]
    assert "/v1/" in first["e"]["error"]["message"]
    capsys.readouterr()

    # Killed in the middle of a line: what is whole stays, the rest is asked again, the mistakes are mended.
    target.write_text(target.read_text() + '{"id": "batch_req_1", "custom_id": "g", "resp')
    write(source, [line(name) for name in "abcdefg"])
    assert run(folder, source, target) == 0
    second = answers(target)
    assert set(second) == set("abcdefg")
    assert second["a"] == first["a"]
    assert second["b"] == first["b"]
    assert second["g"]["response"]["status_code"] == 200
    assert "2 of 7 requests are answered already" in capsys.readouterr().err
    assert run(folder, source, target) == 0
    assert answers(target) == second


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "line 1"), ('{"custom_id": "a"}', "url"), ("5", "line 1"),
     ('{"custom_id": "a", "url": "/v1/x", "body": {}}\n' * 2, "line 2: custom_id 'a' comes twice")],
)  # fmt: skip
def test_a_wrong_line_is_found_before_anything_is_loaded(tmp_path, text, words):
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ConfigError, match=words):
        run(Path("nothing"), source, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="No such file"):
        run(Path("nothing"), tmp_path / "none", tmp_path / "out.jsonl")


def test_an_empty_file_is_done(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("\n")
    assert run(Path("nothing"), source, tmp_path / "out.jsonl") == 0
    assert keep_answers(tmp_path / "out.jsonl") == set()
