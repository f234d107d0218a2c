"""The offline API of pooling models against sentence-transformers' own answers."""

import json
from pathlib import Path

import numpy as np
import pytest

from paxserve import LLM, PoolingParams, RequestError, SamplingParams
from tests.paxserve.fake_core import FakeCore
from tests.small_tokenizers import byte_level_tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "compile_sizes": [64]}


def load(name, **flags):
    return LLM(str(GOLDENS / "pooling" / name), **{**SIZES, **flags})


def texts(name):
    return json.loads((GOLDENS / "pooling" / name / "texts.json").read_text())


@pytest.fixture(scope="module")
def st_bert():
    return load("st_bert")


def vectors(results):
    return np.array([result.outputs.embedding for result in results])


def test_mean_pooling_projection_and_prompts(st_bert):
    """Transformer, Pooling(mean), Dense(tanh), Normalize."""
    data = texts("st_bert")
    results = st_bert.embed(data["texts"], use_tqdm=False)
    np.testing.assert_allclose(vectors(results), data["vectors"], atol=1e-5)
    assert results[0].outputs.hidden_size == 16
    assert results[0].finished
    assert results[0].prompt_token_ids[0] == 2  # [CLS]
    queries = st_bert.embed(data["texts"], use_tqdm=False, prompt_name="query")
    np.testing.assert_allclose(vectors(queries), data["query_vectors"], atol=1e-5)
    by_ids = st_bert.embed([{"prompt_token_ids": r.prompt_token_ids} for r in results], use_tqdm=False)
    np.testing.assert_allclose(vectors(by_ids), data["vectors"], atol=1e-5)


def test_last_token_pooling_of_a_decoder():
    data = texts("st_qwen3")
    llm = load("st_qwen3", hf_overrides={"is_matryoshka": True})
    np.testing.assert_allclose(vectors(llm.embed(data["texts"], use_tqdm=False)), data["vectors"], atol=1e-5)
    short = vectors(llm.embed(data["texts"], pooling_params=PoolingParams(dimensions=8), use_tqdm=False))
    expected = np.array(data["vectors"])[:, :8]
    np.testing.assert_allclose(short, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)
    with pytest.raises(RequestError, match=r"range \[1, 32\], got 33"):
        llm.embed("sea", pooling_params=PoolingParams(dimensions=33))


def test_scores_of_vectors_are_cosines(st_bert):
    data = texts("st_bert")
    scores = [r.outputs.score for r in st_bert.score(data["texts"][0], data["texts"], use_tqdm=False)]
    np.testing.assert_allclose(scores, np.array(data["vectors"]) @ np.array(data["vectors"])[0], atol=1e-5)


def test_a_cross_encoder():
    data = texts("cross_encoder")
    llm = load("cross_encoder")
    scores = [r.outputs.score for r in llm.score(data["texts"][0], data["texts"], use_tqdm=False)]
    np.testing.assert_allclose(scores, data["scores"], atol=1e-5)
    with pytest.raises(RequestError, match="1:1, 1:N or N:N, got 2:3"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(RequestError, match="does not support Embeddings"):
        llm.embed("sea")
    with pytest.raises(RequestError, match="instruction is not supported"):
        llm.score("sea", "river", instruction="be kind")


def test_classes():
    with np.load(GOLDENS / "pooling" / "roberta" / "golden.npz") as data:
        ids, logits = data["ids_1"], data["logits_1"]
    llm = load("roberta", skip_tokenizer_init=True)
    (result,) = llm.classify([ids], use_tqdm=False)
    np.testing.assert_allclose(result.outputs.probs, np.exp(logits) / np.exp(logits).sum(), rtol=1e-4)
    assert result.outputs.num_classes == 3
    (raw,) = llm.classify([ids], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose(raw.outputs.probs, logits, rtol=1e-4)
    with pytest.raises(RequestError, match="num_labels == 1"):
        llm.score("a", "b")
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.classify("text")


def test_encode_and_its_refusals(st_bert):
    (result,) = st_bert.encode("the sea", pooling_task="token_embed", use_tqdm=False)
    assert result.outputs.data.shape == (len(result.prompt_token_ids), 32)
    (cut,) = st_bert.encode(
        "the river runs to the sea", pooling_task="embed", use_tqdm=False,
        tokenization_kwargs={"truncate_prompt_tokens": 4},
    )  # fmt: skip
    assert len(cut.prompt_token_ids) == 4
    assert cut.prompt_token_ids[-1] == 3  # [SEP] stays
    for arguments, message in [
        ({}, "pooling_task is required"),
        ({"pooling_task": "classify"}, "does not support Classification"),
        ({"pooling_task": "embed", "tokenization_kwargs": {"padding": True}}, "'padding'"),
        ({"pooling_task": "embed", "prompt_name": "poem"}, "no prompt named 'poem': it has document, query"),
        ({"pooling_task": "embed", "pooling_params": PoolingParams(dimensions=4)}, "Matryoshka"),
        ({"pooling_task": "embed", "pooling_params": PoolingParams(task="classify")}, "cannot overwrite"),
        ({"pooling_task": "embed", "tokenization_kwargs": {"truncate_prompt_tokens": 1000}}, "from 1 to"),
    ]:
        with pytest.raises(RequestError, match=message):
            st_bert.encode("sea", use_tqdm=False, **arguments)
    for prompts in ("", [], [[999]], [[5] * 65]):
        if prompts == []:
            assert st_bert.embed(prompts, use_tqdm=False) == []
            continue
        with pytest.raises(RequestError):
            st_bert.embed(prompts, use_tqdm=False)


def test_generating_with_a_pooling_model_and_the_reverse(st_bert):
    for call in (st_bert.generate, st_bert.chat, lambda prompt: next(st_bert.stream(prompt))):
        with pytest.raises(RequestError, match="only supported for generative models"):
            call("sea")


def test_vectors_of_a_model_that_generates(monkeypatch):
    monkeypatch.setattr("paxserve.llm.open_core", FakeCore)
    monkeypatch.setattr("paxserve.llm.open_tokenizer", lambda config: byte_level_tokenizer())
    llm = LLM("scripted")
    with pytest.raises(RequestError, match="does not support Embeddings"):
        llm.embed("sea")
    with pytest.raises(RequestError, match="does not support Score"):
        llm.score("sea", "river")
    assert llm.generate("sea", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
