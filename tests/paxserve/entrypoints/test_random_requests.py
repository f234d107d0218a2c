"""Three hundred random requests to a real engine behind a real server: each ends right, and nothing stays behind."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.paxserve.running_server import RunningServer
from tests.small_tokenizers import CHATML, CORPUS

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

NUM_REQUESTS = 300
VOCAB_SIZE = 320
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 48,  # of which three long sequences take all: requests are preempted
}
EXTRAS = {
    "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.4,
    "repetition_penalty": 1.2, "seed": 5, "stop": ["a", "ee"], "logprobs": 3, "echo": True, "ignore_eos": True,
    "min_tokens": 1, "logit_bias": {"5": 3}, "bad_words": ["the"], "cache_salt": "x", "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    golden = Path(__file__).parents[2] / "goldens" / "llama"
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (path / name).symlink_to(golden / name)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": special[0], "eos_token": special[1], "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def url(folder) -> Iterator[str]:
    core = "tests.paxserve.checked_core:CheckedCore"
    with RunningServer(folder, core=core, engine=ENGINE, disable_uvicorn_access_log=True) as server:
        yield server.wait_ready()
        server.process.terminate()
        assert server.wait_exit() == 0


def random_body(source: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": source.randint(1, 100), "temperature": source.choice([0, 0.7, 1.5])}
    if source.random() < 0.5:
        body["prompt"] = "the dog " * source.randint(1, 15)
    else:
        lengths = [source.randint(1, 120) for _ in range(source.randint(1, 3))]
        body["prompt"] = [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    if body["temperature"]:
        body["n"] = source.randint(1, 3)
    body |= {name: value for name, value in EXTRAS.items() if source.random() < 0.2}
    body["stream"] = source.random() < 0.5
    return body


def num_choices(body: dict[str, Any]) -> int:
    return body.get("n", 1) * (1 if isinstance(body["prompt"], str) else len(body["prompt"]))


async def ask(http: httpx.AsyncClient, body: dict[str, Any], patience: float | None) -> None:
    """Send a request and check its answer; with `patience`, leave after so many seconds."""
    try:
        async with asyncio.timeout(patience):
            await (ask_stream if body["stream"] else ask_plain)(http, body)
    except TimeoutError:
        if patience is None:
            raise


async def ask_plain(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices(body)))
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    if body.get("ignore_eos") and "stop" not in body:
        assert answer["usage"]["completion_tokens"] == num_choices(body) * body["max_tokens"]


async def ask_stream(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    finished: list[int] = []
    last = ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line:
                continue
            last = line
            if line != "data: [DONE]":
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    assert choice["index"] not in finished
                    finished += [choice["index"]] if choice["finish_reason"] else []
    assert last == "data: [DONE]"
    assert sorted(finished) == list(range(num_choices(body)))


def gauge(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_every_request_ends_right_and_nothing_stays_behind(url):
    source = random.Random(7)
    jobs = [(random_body(source), source.random() * 2 if source.random() < 0.25 else None) for _ in range(NUM_REQUESTS)]

    async def main() -> str:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            turns = asyncio.Semaphore(24)

            async def take_turn(body, patience):
                async with turns:
                    await ask(http, body, patience)

            await asyncio.gather(*(take_turn(*job) for job in jobs))
            async with asyncio.timeout(10):
                while gauge((await http.get("/metrics")).text, "vllm:num_requests_running"):
                    await asyncio.sleep(0.1)
            assert (await http.get("/health")).status_code == 200
            return (await http.get("/metrics")).text

    text = asyncio.run(main())
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert gauge(text, name) == 0
    assert gauge(text, "paxserve:pages_in_use") == 0
    assert gauge(text, "paxserve:recompilations_total") == 0
    assert gauge(text, "vllm:num_preemptions_total") > 0
