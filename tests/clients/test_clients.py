"""Clients that people use, unchanged, against a running server: `pip install -r tests/clients/requirements.txt` first.

By default the server has a scripted engine; PAXSERVE_CLIENTS_URL names another one, with the model `fake`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paxserve.running_server import RunningServer
from tests.small_tokenizers import CHATML, byte_level_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
HELLO = [{"role": "user", "content": "Hello"}]
KEY = "secret"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    if given := os.environ.get("PAXSERVE_CLIENTS_URL"):
        yield given
        return
    path = tmp_path_factory.mktemp("checkpoint")
    byte_level_tokenizer().backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with RunningServer(path, api_key=[KEY], host="127.0.0.1", enable_responses_store=True) as server:
        yield server.wait_ready()


def test_openai(url):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    assert client.models.list().data[0].id == "fake"
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=12)
    text = answer.choices[0].message.content
    assert text
    ended = {"model": "fake", "messages": HELLO, "max_tokens": 40, "stop": ["three"]}
    with client.chat.completions.stream(**ended) as stream:  # refuses answers that are cut off
        whole = client.chat.completions.create(**ended).choices[0].message.content
        assert stream.get_final_completion().choices[0].message.content == whole
    response = client.responses.create(model="fake", input="Hello", max_output_tokens=12)
    assert response.output_text == text
    with client.responses.stream(model="fake", input="Hello", max_output_tokens=12) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert client.responses.retrieve(response.id).output_text == text


def test_openais_errors_are_of_its_classes(url):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="fake", messages=HELLO, temperature=9, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


def test_openais_npm_package(url):
    """Needs node, and the folder of `npm install openai` in PAXSERVE_NODE_MODULES or beside this file."""
    folder = Path(os.environ.get("PAXSERVE_NODE_MODULES", Path(__file__).parent / "node_modules"))
    if shutil.which("node") is None or not (folder / "openai").is_dir():
        pytest.skip("needs node and `npm install openai` in tests/clients")
    # Modules are looked for beside the script, wherever that is.
    script = folder.parent / "paxserve-openai.mjs"
    shutil.copy(Path(__file__).with_name("openai.mjs"), script)
    environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY}
    try:
        done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=60, env=environment)
    finally:
        script.unlink()
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["models"] == ["fake"]
    assert told["chat"] == told["streamed"] == told["response"] != ""
    assert told["completion"]
    assert 0 < told["tokens"] == told["streamedTokens"] <= 12
    assert told["helper"] == "stop"
    assert told["events"][0] == "response.created"
    assert told["events"][-1] == "response.completed"
    assert told["errors"] == {
        "bad": ["BadRequestError", 400, "temperature"], "missing": ["NotFoundError", 404, "model"],
        "unknown": ["AuthenticationError", 401, None],
    }  # fmt: skip
    assert told["left"] is True


def test_anthropic(url):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    message = client.messages.create(model="fake", max_tokens=12, messages=HELLO, system="Be brief.")
    assert message.content[0].text
    assert message.usage.output_tokens == 12
    with client.messages.stream(model="fake", max_tokens=12, messages=HELLO, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        assert stream.get_final_message().stop_reason == "max_tokens"
    count = client.messages.count_tokens(model="fake", messages=HELLO, system="Be brief.")
    assert count.input_tokens == message.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="fake", max_tokens=0, messages=HELLO)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(
            model="fake", max_tokens=1, messages=HELLO
        )


def test_langchain(url):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key=KEY, max_tokens=12, max_retries=0)
    whole = chat.invoke("Hello")
    assert whole.content
    assert 0 < whole.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == whole.content
    assert [answer.content for answer in chat.batch(["Hello", "Hello"])] == [whole.content] * 2


def test_litellm(url):
    litellm = pytest.importorskip("litellm")
    for model, base in (("hosted_vllm/fake", f"{url}/v1"), ("openai/fake", f"{url}/v1"), ("anthropic/fake", url)):
        options = {"model": model, "messages": HELLO, "max_tokens": 12, "api_base": base, "api_key": KEY}
        whole = litellm.completion(**options).choices[0].message.content
        assert whole
        chunks = list(litellm.completion(**options, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_instructor_reads_an_answer_into_a_model(url):
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    class Greeting(BaseModel):
        text: str

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=instructor.Mode.MD_JSON
    )
    # A scripted or a small model writes no JSON: what counts is that the answer comes and its failure is the reader's.
    from instructor.core import IncompleteOutputException, InstructorRetryException

    with pytest.raises((InstructorRetryException, IncompleteOutputException)) as failed:
        client.chat.completions.create(
            model="fake", response_model=Greeting, messages=HELLO, max_tokens=40, stop=["three"], max_retries=1
        )
    assert failed.value.last_completion.choices[0].message.content


def test_the_llm_command(url, tmp_path):
    pytest.importorskip("llm")
    models = f"- model_id: ours\n  model_name: fake\n  api_base: {url}/v1\n  api_key_name: ours\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    (tmp_path / "keys.json").write_text(json.dumps({"ours": KEY}))
    command = [str(Path(sys.executable).with_name("llm")), "-m", "ours", "-o", "max_tokens", "12", "--no-log", "Hello"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    outputs = [
        subprocess.run(
            [*command, *extra], capture_output=True, text=True, timeout=60, check=True, env=environment
        ).stdout
        for extra in ([], ["--no-stream"])
    ]
    assert outputs[0].strip()
    assert outputs[0] == outputs[1]


def test_aiperf_measures_a_load(url, tmp_path):
    """aiperf has an environment of its own (tests/clients/requirements-load.txt): PAXSERVE_AIPERF is its command."""
    command = os.environ.get("PAXSERVE_AIPERF") or shutil.which("aiperf")
    if command is None:
        pytest.skip("needs aiperf")
    tokenizer = tmp_path / "tokenizer"  # only for prompts of about the right length: the server counts
    tokenizer.mkdir()
    byte_level_tokenizer().backend.save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    load = [
        command, "profile", "--model", "fake", "--url", url, "--api-key", KEY, "--endpoint-type", "chat", "--streaming",
        "--concurrency", "4", "--request-count", "16", "--isl", "60", "--osl", "12",
        "--extra-inputs", "ignore_eos:true", "--tokenizer", str(tokenizer), "--use-server-token-count",
        "--ui", "none", "--output-artifact-dir", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(load, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    figures = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text())
    assert figures["request_count"]["avg"] == 16
    assert figures["output_sequence_length"]["avg"] == 12
    assert figures["time_to_first_token"]["avg"] > 0
    assert figures["inter_token_latency"]["avg"] > 0


def test_schemathesis_finds_no_route_that_fails(url):
    pytest.importorskip("schemathesis")
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json",
        "--header", f"Authorization: Bearer {KEY}", "--checks", "not_a_server_error",
        "--max-examples", os.environ.get("PAXSERVE_FUZZ_EXAMPLES", "15"), "--phases", "examples,fuzzing", "--no-color",
        "--request-timeout", "20",
    ]  # fmt: skip
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
