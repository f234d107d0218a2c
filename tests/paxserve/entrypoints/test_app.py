import asyncio
import json
import re
from pathlib import Path

import pytest

import paxserve
from paxserve.messages import EngineStats
from tests.paxserve.fake_core import CRASH
from tests.paxserve.serving import Serving, run
from tests.small_tokenizers import byte_level_tokenizer

ROUTES = {
    ("GET", "/health"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{name:path}"), ("POST", "/detokenize"), ("POST", "/tokenize"),
    ("GET", "/load"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/tokenizer_info"),
    ("POST", "/v1/chat/completions/batch"), ("POST", "/v1/responses"), ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
    ("POST", "/invocations"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("POST", "/classify"), ("POST", "/pooling"), ("POST", "/v1/embeddings"), ("POST", "/score"), ("POST", "/v1/score"),
    ("POST", "/rerank"), ("POST", "/v1/rerank"), ("POST", "/v2/rerank"),
}  # fmt: skip


def value_of(text: str, name: str, **labels: str) -> float:
    labels = {"engine": "0", "model_name": "fake", **labels}
    shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return float(next(line for line in text.splitlines() if line.startswith(f"{name}{{{shown}}} ")).rsplit(" ", 1)[1])


def test_the_routes_are_these():
    async def test(served: Serving):
        schema = (await served.http.get("/openapi.json")).json()
        return {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}

    assert run(test) == {(method, path.replace(":path", "")) for method, path in ROUTES}


def test_health_and_version():
    async def test(served: Serving):
        return await served.http.get("/health"), (await served.http.get("/version")).json()

    health, version = run(test)
    assert health.status_code == 200
    assert not health.content
    assert version == {"version": paxserve.__version__}


def test_ping_is_health():
    async def test(served: Serving):
        alive = [await served.http.get("/ping"), await served.http.post("/ping")]
        await served.complete(CRASH)
        return alive, await served.http.get("/ping")

    alive, dead = run(test)
    assert [(response.status_code, response.content) for response in alive] == [(200, b"")] * 2
    assert dead.status_code == 503


def test_the_load_is_what_is_being_answered():
    async def test(served: Serving):
        served.core.step_seconds = 0.01
        requests = [asyncio.ensure_future(served.complete(max_tokens=40)) for _ in range(3)]
        while len(served.core.choices) < 3:
            await asyncio.sleep(0.01)
        busy = (await served.http.get("/load")).json()
        await asyncio.gather(*requests)
        return busy, (await served.http.get("/load")).json()

    assert run(test) == ({"server_load": 3}, {"server_load": 0})


def test_the_tokenizer_is_shown_only_when_the_server_says_so():
    async def test(served: Serving):
        return await served.http.get("/tokenizer_info")

    assert run(test).status_code == 404
    info = run(test, enable_tokenizer_info_endpoint=True).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["vocab_size"] == byte_level_tokenizer().vocab_size
    assert "im_start" in info["chat_template"]


@pytest.mark.parametrize(
    ("server", "expected"),
    [({"fingerprint_mode": "hash"}, r"[0-9a-f]{8}"), ({"fingerprint_mode": "none"}, "None"),
     ({"fingerprint_mode": "custom", "fingerprint_value": "v7"}, "v7"), ({}, r"paxserve-[\d.]+-[0-9a-f]{8}")],
)  # fmt: skip
def test_the_fingerprint(server, expected):
    async def test(served: Serving):
        return (await served.chat(max_tokens=1)).json()["system_fingerprint"]

    assert re.fullmatch(expected, str(run(test, **server)))


def test_models_are_listed_under_every_name():
    async def test(served: Serving):
        return (await served.http.get("/v1/models")).json(), (await served.http.get("/v1/models/b/c")).json()

    listed, one = run(test, served_model_name=["a", "b/c"])
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["a", "b/c"]
    card = listed["data"][1]
    assert card == one
    assert (card["object"], card["root"], card["max_model_len"]) == ("model", "fake", 512)


def test_tokenize_and_detokenize_are_inverse():
    text = "café 😀 dog"

    async def test(served: Serving):
        body = (await served.post("/tokenize", prompt=text, return_token_strs=True)).json()
        back = (await served.post("/detokenize", tokens=body["tokens"])).json()
        return body, back

    body, back = run(test)
    assert body["tokens"] == byte_level_tokenizer().encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    assert back == {"prompt": text}


def test_tokenize_shows_the_prompt_that_a_chat_uses():
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hello"}]

    async def test(served: Serving):
        shown = (await served.post("/tokenize", messages=messages)).json()["tokens"]
        shorter = (await served.post("/tokenize", messages=messages, add_generation_prompt=False)).json()["tokens"]
        usage = (await served.post("/v1/chat/completions", messages=messages, max_tokens=1)).json()["usage"]
        text = (await served.post("/detokenize", tokens=shown)).json()["prompt"]
        return shown, shorter, usage, text, served.client.added[0].prompt_token_ids

    shown, shorter, usage, text, used = run(test)
    assert shown == used
    assert usage["prompt_tokens"] == len(shown)
    assert shown[: len(shorter)] == shorter
    assert text.startswith("<|im_start|>system\nBrief.<|im_end|>")


def test_detokenize_refuses_ids_that_are_none():
    async def test(served: Serving):
        return [await served.post("/detokenize", tokens=[token]) for token in (-1, 10**9, 2**70)]

    for response in run(test):
        assert response.status_code == 400


def test_metrics_tell_what_happened():
    async def test(served: Serving):
        await served.complete("Hello", max_tokens=8)
        await served.complete("Hello", n=2, max_tokens=4, temperature=1)
        await served.complete("Hello", max_tokens=100, stop=["two"])
        return (await served.http.get("/metrics")).text

    text = run(test)
    assert value_of(text, "vllm:num_requests_running") == 0
    assert value_of(text, "vllm:num_requests_waiting") == 0
    assert value_of(text, "vllm:kv_cache_usage_perc") == 0
    assert value_of(text, "vllm:prompt_tokens_total") == 3
    assert value_of(text, "vllm:generation_tokens_total") >= 23
    assert value_of(text, "vllm:request_success_total", finished_reason="length") == 3
    assert value_of(text, "vllm:request_success_total", finished_reason="stop") == 1
    assert value_of(text, "vllm:request_success_total", finished_reason="abort") == 0
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_decode_time_seconds",
        "request_prefill_time_seconds", "request_inference_time_seconds", "request_time_per_output_token_seconds",
    ):  # fmt: skip
        assert value_of(text, f"vllm:{name}_count") == 3, name
    assert value_of(text, "vllm:request_generation_tokens_sum") == 8 + 8 + 7
    assert value_of(text, "vllm:inter_token_latency_seconds_count") == 7 + 6 + 6
    assert value_of(text, "vllm:iteration_tokens_total_count") > 0
    assert value_of(text, "paxserve:recompilations_total") == 0
    assert value_of(text, "paxserve:programs") == 3
    info = re.search(r"vllm:cache_config_info{(.*)} 1.0", text)
    assert info
    assert 'block_size="16"' in info[1]
    assert 'num_gpu_blocks="100"' in info[1]


def test_prompt_tokens_are_told_by_their_source():
    async def test(served: Serving):
        stats = EngineStats(num_pages=9, prompt_tokens=50, prefix_cache_hits=32, num_waiting=2)
        served.engine.metrics.engine.stats = stats
        return served.engine.metrics.render().decode()

    text = run(test)
    assert value_of(text, "vllm:prompt_tokens_cached_total") == 32
    for source, value in (("computed", 18), ("local_cache_hit", 32), ("external_kv_transfer", 0)):
        assert value_of(text, "vllm:prompt_tokens_by_source_total", source=source) == value
    assert value_of(text, "vllm:prompt_tokens_cached_by_source_total", source="device") == 32
    assert value_of(text, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value_of(text, "vllm:num_requests_waiting_by_reason", reason="deferred") == 0


def test_http_requests_are_counted_by_route():
    async def test(served: Serving):
        await served.complete("Hello", max_tokens=2, stream=True)
        await served.complete(temperature=9)
        await served.http.get("/v1/models/nothing")
        await served.http.request("BREW", "/v1/models")
        await served.http.get("/health")
        return (await served.http.get("/metrics")).text

    text = run(test)
    counted = {line for line in text.splitlines() if line.startswith("http_requests_total{")}
    assert counted == {
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/models/{name:path}",method="GET",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/models",method="OTHER",status="4xx"} 1.0',
    }
    assert 'http_request_duration_seconds_count{handler="/v1/completions",method="POST"} 2.0' in text
    assert "http_request_duration_highr_seconds_count 4.0" in text
    assert 'http_response_size_bytes_count{handler="/v1/completions"} 2.0' in text


def test_the_dashboard_asks_for_metrics_that_there_are():
    dashboard = json.loads((Path(paxserve.__file__).parent.parent / "docs/grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|paxserve):\w+|http_\w+", target["expr"])
    }

    async def test(served: Serving):
        await served.complete(max_tokens=2)
        served.engine.metrics.engine.stats = EngineStats(num_pages=9, step_seconds={"wait": 1.0})
        return (await served.http.get("/metrics")).text

    told = {line.split("{")[0].split(" ")[0] for line in run(test).splitlines() if not line.startswith("#")}
    assert len(asked) > 20
    assert asked <= told


def test_every_metric_that_is_said_to_be_there_is_there_after_one_request():
    surface = json.loads((Path(paxserve.__file__).parent.parent / "docs/vllm_surface.json").read_text())
    names = set(surface["metrics"]) - set(surface["absent"])

    async def test(served: Serving):
        await served.chat(max_tokens=3)
        return (await served.http.get("/metrics")).text

    samples = {line.split("{")[0].split(" ")[0] for line in run(test).splitlines() if not line.startswith("#")}
    assert len(names) > 30
    assert not {name for name in names if not samples & {name, f"{name}_total", f"{name}_bucket", f"{name}_count"}}


def test_under_the_path_of_a_proxy():
    async def test(served: Serving):
        scope_of = served.http._transport.root_path
        served.http._transport.root_path = "/models"
        try:
            open_, shut = await served.http.get("/models/health"), await served.http.get("/models/v1/models")
        finally:
            served.http._transport.root_path = scope_of
        return open_.status_code, shut.status_code

    assert run(test, api_key=["secret"]) == (200, 401)


def test_histograms_have_vllms_buckets():
    async def test(served: Serving):
        return (await served.http.get("/metrics")).text

    text = run(test)
    first = re.findall(r'vllm:time_to_first_token_seconds_bucket{.*le="([^"]+)".*}', text)
    assert first[:4] == ["0.001", "0.005", "0.01", "0.02"]
    assert first[-2:] == ["2560.0", "+Inf"]
    lengths = re.findall(r'vllm:request_prompt_tokens_bucket{.*le="([^"]+)".*}', text)
    assert lengths == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"]
