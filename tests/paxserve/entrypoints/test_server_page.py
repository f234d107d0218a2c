"""The examples of README.md and docs/server.md, run as they stand, but for the address of the server."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paxserve
from paxserve.arguments import expand
from paxserve.cli import build_parser
from tests.paxserve.running_server import RunningServer
from tests.small_tokenizers import CHATML, byte_level_tokenizer

ROOT = Path(paxserve.__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCK = re.compile(r"^```(sh|python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(name, *block) for name, page in PAGES.items() for block in BLOCK.findall(page)]
ADDRESS = "http://127.0.0.1:8000"
EXAMPLES = [
    (language, code) for name, language, code in BLOCKS if name in ("README.md", "server.md") and f"{ADDRESS}/" in code
]
"""What asks a running server something."""
COMMANDS = [
    line.removeprefix("$ ").partition("  #")[0].strip().removesuffix(" &")
    for _, language, code in BLOCKS
    for line in code.replace("\\\n", " ").splitlines()
    if language != "python" and line.removeprefix("$ ").startswith("paxserve ")
]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("checkpoint")
    byte_level_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with RunningServer(path, served_model_name=["fake", "smollm2-135m-instruct"]) as server:
        yield server.wait_ready()


def test_there_are_examples():
    assert len(EXAMPLES) >= 9
    assert all(ADDRESS in code for _, code in EXAMPLES)
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_a_command_of_the_documents_is_one(command):
    words = [word.replace("$!", "1") for word in shlex.split(command)[1:]]
    words = words[: words.index(">")] if ">" in words else words
    build_parser().parse_args(expand(words))


@pytest.mark.slow
@pytest.mark.e2e
def test_the_offline_example_of_the_readme():
    (code,) = [code for name, language, code in BLOCKS if name == "README.md" and "LLM(" in code]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert len(done.stdout.splitlines()) >= 3


@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_an_example(url, language, code):
    if language == "sh" and shutil.which("curl") is None:
        pytest.skip("needs curl")
    program = ["bash", "-ec"] if language == "sh" else [sys.executable, "-c"]
    done = subprocess.run(
        [*program, code.replace(ADDRESS, url)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip()
    assert '"error"' not in done.stdout
