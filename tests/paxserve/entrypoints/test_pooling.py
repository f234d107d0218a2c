"""The pooling endpoints over a real engine of a tiny model, and what other models answer there."""

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import openai
import pytest

from paxserve import PoolingParams
from paxserve.config import EngineConfig
from paxserve.engine.cores import open_core
from paxserve.loaders.checkpoint import open_tokenizer
from tests.paxserve.serving import Serving, run, serving_core

GOLDENS = Path(__file__).parents[2] / "goldens" / "pooling"


def start(name, **flags):
    flags = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "compile_sizes": [64], **flags}
    config = EngineConfig.from_flags(model=str(GOLDENS / name), **flags)
    tokenizer = None if config.model.skip_tokenizer_init else open_tokenizer(config.model)
    return config, open_core(config), tokenizer


@pytest.fixture(scope="module")
def embedder():
    return start("st_bert", hf_overrides={"matryoshka_dimensions": [8, 16]})


@pytest.fixture(scope="module")
def cross_encoder():
    return start("cross_encoder")


@pytest.fixture(scope="module")
def classifier():
    return start("roberta", skip_tokenizer_init=True)


def on(model, test):
    """The result of `test` on a server of the model."""

    async def main():
        async with serving_core(*model) as served:
            return await asyncio.wait_for(test(served), 60)

    return asyncio.run(main())


def texts(name):
    return json.loads((GOLDENS / name / "texts.json").read_text())


def test_embeddings(embedder):
    data = texts("st_bert")

    async def test(served: Serving):
        whole = await served.post("/v1/embeddings", input=data["texts"], model="fake", user="me")
        one = await served.post("/v1/embeddings", input=data["texts"][2], prompt_name="query")
        ids = await served.post("/v1/embeddings", input=[[2, 21, 3], [2, 3]])
        flat = await served.post("/v1/embeddings", input=[2, 21, 3], encoding_format="base64", dimensions=8)
        metrics = (await served.http.get("/metrics")).text
        return [r.json() for r in (whole, one, ids, flat)], metrics

    (whole, one, ids, flat), metrics = on(embedder, test)
    assert whole["id"].startswith("embd-")
    assert (whole["object"], whole["model"]) == ("list", "fake")
    assert [(item["index"], item["object"]) for item in whole["data"]] == [(i, "embedding") for i in range(4)]
    np.testing.assert_allclose([item["embedding"] for item in whole["data"]], data["vectors"], atol=1e-5)
    count = whole["usage"]["prompt_tokens"]
    assert count == whole["usage"]["total_tokens"] == sum(len(text.split()) + 2 for text in data["texts"])
    np.testing.assert_allclose(one["data"][0]["embedding"], data["query_vectors"][2], atol=1e-5)
    assert len(ids["data"]) == 2
    np.testing.assert_allclose(ids["data"][0]["embedding"], data["vectors"][2], atol=1e-5)
    short = np.frombuffer(base64.b64decode(flat["data"][0]["embedding"]), np.float32)
    expected = np.array(data["vectors"][2][:8])
    np.testing.assert_allclose(short, expected / np.linalg.norm(expected), atol=1e-5)
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 8.0' in metrics


def test_openai_client(embedder):
    data = texts("st_bert")

    async def test(served: Serving):
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=served.http)
        answer = await client.embeddings.create(model="fake", input=data["texts"])
        with pytest.raises(openai.BadRequestError, match="Matryoshka dimensions"):
            await client.embeddings.create(model="fake", input="sea", dimensions=7)
        return answer

    answer = on(embedder, test)
    np.testing.assert_allclose([item.embedding for item in answer.data], data["vectors"], atol=1e-5)
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input"),
        ({"input": []}, "1 to 2048 texts"),
        ({"input": ["sea"] * 2049}, "1 to 2048 texts"),
        ({"input": ""}, "must not be empty"),
        ({"input": ["sea", ""]}, "must not be empty"),
        ({"input": [[]]}, "must not be empty"),
        ({"input": [1, -1]}, "out of vocabulary"),
        ({"input": [[128]]}, "out of vocabulary"),
        ({"input": "sea", "normalize": True}, "use `use_activation` instead"),
        ({"input": "sea", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "sea", "dimensions": 0}, "dimensions"),
        ({"input": "sea", "colour": 1}, "no field of this endpoint"),
        ({"input": "sea", "prompt_name": "poem"}, "no prompt named"),
        ({"input": "sea " * 100}, "maximum context length is 64"),
        ({"input": "sea", "truncate_prompt_tokens": 65}, "from 1 to max_model_len=64"),
        ({"input": "sea", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_embeddings_that_are_refused(embedder, body, message):
    answer = on(embedder, lambda served: served.post("/v1/embeddings", **body))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_truncation(embedder):
    async def test(served: Serving):
        bodies = [{"truncate_prompt_tokens": 10}, {"truncate_prompt_tokens": -1, "truncation_side": "left"}]
        return [(await served.post("/v1/embeddings", input="sea " * 100, **body)).json() for body in bodies]

    assert [body["usage"]["prompt_tokens"] for body in on(embedder, test)] == [10, 64]


def test_scores_and_ranks_of_an_embedding_model(embedder):
    data = texts("st_bert")

    async def test(served: Serving):
        score = await served.post("/score", text_1=data["texts"][0], text_2=data["texts"])
        rank = await served.post("/v2/rerank", query=data["texts"][0], documents=data["texts"], top_n=2)
        return score.json(), rank.json()

    score, rank = on(embedder, test)
    expected = np.array(data["vectors"]) @ np.array(data["vectors"][0])
    np.testing.assert_allclose([item["score"] for item in score["data"]], expected, atol=1e-5)
    assert [item["index"] for item in rank["results"]] == np.argsort(-expected)[:2].tolist()


def test_a_cross_encoder_scores_and_ranks(cross_encoder):
    data = texts("cross_encoder")

    async def test(served: Serving):
        bodies = [
            {"queries": data["texts"][0], "documents": data["texts"]},
            {"data_1": [data["texts"][0]] * 4, "data_2": [{"text": text} for text in data["texts"]]},
        ]
        scores = [(await served.post(path, **body)).json() for path in ("/score", "/v1/score") for body in bodies]
        ranks = []
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            answer = await served.post(path, query=data["texts"][0], documents=data["texts"], return_documents=False)
            ranks.append(answer.json())
        cut = await served.post(
            "/rerank", query=data["texts"][0], documents=data["texts"][2:], max_tokens_per_query=1, max_tokens_per_doc=2
        )
        return scores, ranks, cut.json()

    scores, ranks, cut = on(cross_encoder, test)
    for body in scores:
        np.testing.assert_allclose([item["score"] for item in body["data"]], data["scores"], atol=1e-5)
        assert {item["object"] for item in body["data"]} == {"score"}
        assert body["usage"]["prompt_tokens"] > 40
    for body in ranks:
        order = np.argsort(-np.array(data["scores"])).tolist()
        assert [item["index"] for item in body["results"]] == order
        assert "document" not in body["results"][0]
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
    assert cut["usage"]["prompt_tokens"] == (1 + 1 + 3) + (1 + 2 + 3)
    assert cut["results"][0]["document"] == {"text": data["texts"][2 + cut["results"][0]["index"]], "multi_modal": None}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"queries": "a"}, "Two sides are needed"),
        ("/score", {"queries": "a", "documents": "b", "items": "c"}, "Two sides are needed"),
        ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "1:1, 1:N or N:N"),
        ("/score", {"queries": "a", "documents": []}, "1 to 2048 texts"),
        ("/score", {"queries": "a", "documents": "b", "instruction": "be kind"}, "instruction is not supported"),
        ("/score", {"queries": "a", "documents": "b", "max_tokens_per_doc": 64}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "image": "c"}]}, "image"),
        ("/rerank", {"query": "a", "documents": ["b"], "chat_template_kwargs": {"x": 1}}, "instruction only"),
    ],
)
def test_scores_that_are_refused(cross_encoder, path, body, message):
    answer = on(cross_encoder, lambda served: served.post(path, **body))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_classes(classifier):
    with np.load(GOLDENS / "roberta" / "golden.npz") as data:
        ids, logits = data["ids_1"].tolist(), data["logits_1"]

    async def test(served: Serving):
        classes = (await served.post("/classify", input=[ids])).json()
        raw = (await served.post("/pooling", input=ids, use_activation=False)).json()
        return classes, raw

    classes, raw = on(classifier, test)
    (item,) = classes["data"]
    np.testing.assert_allclose(item["probs"], np.exp(logits) / np.exp(logits).sum(), rtol=1e-4)
    assert (item["label"], item["num_classes"]) == (f"class {logits.argmax()}", 3)
    assert classes["id"].startswith("classify-")
    np.testing.assert_allclose(raw["data"][0]["data"], logits, rtol=1e-4)
    assert raw["data"][0]["object"] == "pooling"


def test_invocations_do_what_the_model_can(embedder, classifier, cross_encoder):
    async def of_embedder(served: Serving):
        bodies = [{"input": "sea"}, {"queries": "sea", "documents": "river"}, {"prompt": "sea"}]
        return [(await served.post("/invocations", **body)).json() for body in bodies]

    vector, score, refused = on(embedder, of_embedder)
    assert len(vector["data"][0]["embedding"]) == 16
    assert vector["object"] == score["object"] == "list"
    assert "one of the fields input, query, queries" in refused["error"]["message"]
    classes = on(classifier, lambda served: served.post("/invocations", input=[5, 6]))
    assert classes.json()["data"][0]["num_classes"] == 3
    ranks = on(cross_encoder, lambda served: served.post("/invocations", query="sea", documents=["river", "sun"]))
    assert len(ranks.json()["results"]) == 2


def test_pooling_of_every_token(embedder):
    async def test(served: Serving):
        return (await served.post("/pooling", input=["sea", "the sea"], task="token_embed")).json()

    assert [np.shape(item["data"]) for item in on(embedder, test)["data"]] == [(3, 32), (4, 32)]


def test_a_route_that_the_model_cannot_do_is_not_found(embedder, classifier):
    async def of_embedder(served: Serving):
        return [
            await served.post("/classify", input="sea"),
            await served.post("/pooling", input="sea", task="classify"),
            await served.complete("sea"),
        ]

    async def of_classifier(served: Serving):
        return [
            await served.post("/v1/embeddings", input="sea"),
            await served.post("/score", queries="a", documents="b"),
            await served.post("/rerank", query="a", documents=["b"]),
        ]

    async def of_generator(served: Serving):
        paths = {"/v1/embeddings": {"input": "sea"}, "/pooling": {"input": "sea"}, "/classify": {"input": "sea"}}
        paths |= {"/score": {"queries": "a", "documents": "b"}, "/rerank": {"query": "a", "documents": "b"}}
        return [await served.post(path, **body) for path, body in paths.items()]

    for answer in [*on(embedder, of_embedder), *on(classifier, of_classifier), *run(of_generator)]:
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["type"] == "NotFoundError"


def test_a_client_that_leaves_aborts_its_requests(embedder):
    async def test(served: Serving):
        requests = [served.context.pooling.process("x", "sea", PoolingParams(task="embed")) for _ in range(3)]
        task = asyncio.ensure_future(served.engine.pool(requests))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        assert served.engine.num_unfinished == 0
        assert len(served.client.aborted) == 3
        again = await served.post("/v1/embeddings", input="sea")
        return again.status_code

    assert on(embedder, test) == 200
