"""The examples of docs/server.md, run as they stand, but for the address of the server."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paxserve
from tests.paxserve.running_server import RunningServer
from tests.small_tokenizers import CHATML, byte_level_tokenizer

PAGE = (Path(paxserve.__file__).parent.parent / "docs/server.md").read_text()
EXAMPLES = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("checkpoint")
    byte_level_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with RunningServer(path, served_model_name=["fake", "smollm2-135m-instruct"]) as server:
        yield server.wait_ready()


def test_there_are_examples():
    assert len(EXAMPLES) >= 5
    assert all(ADDRESS in code for _, code in EXAMPLES)


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
