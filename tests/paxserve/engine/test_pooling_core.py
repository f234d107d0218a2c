"""The pooling engine: batches, prompts of every length, aborts, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from paxserve import ConfigError, RequestError
from paxserve.config import EngineConfig
from paxserve.engine.cores import open_core
from paxserve.engine.engine_core import EngineCore
from paxserve.engine.pooling_core import PoolingCore, activate
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.loaders.hf_tokenizer import load_folder_tokenizer
from paxserve.loaders.pooling_spec import PoolingSpec
from paxserve.messages import EngineRequest
from paxserve.pooling_params import PoolingParams
from paxserve.sampling_params import SamplingParams

GOLDENS = Path(__file__).parents[2] / "goldens"
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "compile_sizes": [32]}


def make_core(name, **flags):
    return open_core(EngineConfig.from_flags(model=str(GOLDENS / name), **{**SIZES, **flags}))


def golden(name):
    with np.load(GOLDENS / "pooling" / name / "golden.npz") as data:
        return dict(data)


def request(request_id, ids, types=None, **params):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[int(i) for i in ids],
        params=SamplingParams(),
        arrival_time=0.0,
        pooling=PoolingParams(**params),
        num_first=None if types is None else int(np.argmax(types)),
    )


def drain(core):
    results = {}
    while core.has_unfinished_requests():
        for output in core.step():
            core.check_integrity()
            values = None if output.pooled is None else np.frombuffer(output.pooled, np.float32)
            results[output.request_id] = (output.finish_reason, values)
    stats = core.stats()
    assert stats.recompilations == 0
    assert stats.num_waiting == stats.num_running == 0
    return results


@pytest.fixture(scope="module")
def bert():
    return make_core("pooling/bert")


def test_vectors_alone_and_in_a_crowd(bert):
    data = golden("bert")
    expected = {}
    for i in range(3):
        vector = data[f"hidden_{i}"][0]  # an encoder without sentence-transformers' files pools its first token
        expected[str(i)] = vector / np.linalg.norm(vector)
    for i in range(3):
        bert.add_request(request(str(i), data[f"ids_{i}"], task="embed"))
        ((reason, vector),) = drain(bert).values()
        assert reason == "stop"
        np.testing.assert_allclose(vector, expected[str(i)], atol=1e-5)
    # More requests than rows, and more tokens than one step holds.
    for copy in range(4):
        for i in range(3):
            bert.add_request(request(f"{i} {copy}", data[f"ids_{i}"], task="embed"))
    before = bert.stats().num_steps
    results = drain(bert)
    assert bert.stats().num_steps - before >= 5
    for request_id, (_, vector) in results.items():
        np.testing.assert_allclose(vector, expected[request_id.split()[0]], atol=1e-5)


def test_a_vector_a_token(bert):
    data = golden("bert")
    bert.add_request(request("raw", data["ids_1"], task="token_embed", use_activation=False))
    bert.add_request(request("unit", data["ids_1"], task="token_embed"))
    results = drain(bert)
    raw, unit = (results[name][1].reshape(17, -1) for name in ("raw", "unit"))
    np.testing.assert_allclose(raw, data["hidden_1"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)


def test_aborts_of_waiting_and_running_requests(bert):
    ids = golden("bert")["ids_2"]
    for name in "abcd":
        bert.add_request(request(name, ids, task="embed"))
    assert bert.step() == []  # a is launched, for only one of them fits into a step
    bert.abort_requests([("a", None), ("c", None), ("unknown", None)])
    results = drain(bert)
    assert {name: reason for name, (reason, _) in results.items()} == {
        "a": "abort", "b": "stop", "c": "abort", "d": "stop",
    }  # fmt: skip
    assert bert.stats().num_waiting == 0


def test_what_can_never_run_is_refused(bert):
    for count in (0, 65):
        with pytest.raises(RequestError, match="1 to 64 tokens"):
            bert.add_request(request("x", [5] * count, task="embed"))
    plain = EngineRequest(request_id="x", prompt_token_ids=[5], params=SamplingParams(), arrival_time=0.0)
    with pytest.raises(RequestError, match="does not generate"):
        bert.add_request(plain)


def test_pairs_are_told_apart():
    core, data = make_core("pooling/bert_pair"), golden("bert_pair")
    for i in range(3):
        core.add_request(request(str(i), data[f"ids_{i}"], data[f"types_{i}"], task="classify", use_activation=False))
    core.add_request(request("score", data["ids_0"], data["types_0"], task="classify"))
    results = drain(core)
    for i in range(3):
        np.testing.assert_allclose(results[str(i)][1], data[f"logits_{i}"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results["score"][1], 1 / (1 + np.exp(-data["logits_0"])), rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"model": "pooling/qwen3_causal"}, EngineCore),
        ({"model": "pooling/qwen3_causal", "runner": "pooling"}, PoolingCore),
        ({"model": "pooling/st_qwen3"}, PoolingCore),
        ({"model": "pooling/st_qwen3", "runner": "generate"}, EngineCore),
    ],
)
def test_what_a_checkpoint_is_run_for(flags, kind, monkeypatch):
    made = []
    monkeypatch.setattr(EngineCore, "__init__", lambda self, *arguments: made.append(EngineCore))
    monkeypatch.setattr(PoolingCore, "__init__", lambda self, *arguments: made.append(PoolingCore))
    make_core(flags.pop("model"), **flags)
    assert made == [kind]


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("pooling/bert", {"runner": "generate"}, "cannot generate"),
        ("pooling/gemma3_both_ways", {"runner": "generate"}, "cannot generate"),
        ("pooling/bert", {"pooler_config": {"pooling_type": "max"}}, "pooling_type must be one of CLS, MEAN, LAST"),
        ("pooling/bert", {"pooler_config": {"step_tag_id": 3}}, "step_tag_id=3 is not supported"),
        ("pooling/qwen3_causal", {"pooler_config": {"pooling_type": "mean"}}, "runner=pooling"),
        ("pooling/bert", {"hf_overrides": {"architectures": ["BertForTokenClassification"]}}, "is not supported"),
        ("pooling/bert", {"max_model_len": 100}, "max_position_embeddings=64"),
        ("llama4_text", {"runner": "pooling"}, "attention in chunks or latents"),
        ("pooling/bert", {"tensor_parallel_size": 2}, "not supported for pooling models"),
    ],
)
def test_configurations_that_cannot_be(name, flags, message):
    with pytest.raises(ConfigError, match=message):
        make_core(name, **flags)


def test_a_language_model_that_answers_yes_or_no(tmp_path):
    for path in (GOLDENS / "pooling" / "qwen3_causal").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((GOLDENS / "pooling" / "st_qwen3" / "tokenizer.json").read_bytes())
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["river", "sea"]}
    core = open_core(EngineConfig.from_flags(model=str(tmp_path), hf_overrides=overrides, max_model_len=64, **SIZES))
    data = golden("qwen3_causal")
    for i in range(3):
        core.add_request(request(str(i), data[f"ids_{i}"], task="classify"))
    results = drain(core)
    no, yes = load_folder_tokenizer(tmp_path).convert_tokens_to_ids(["river", "sea"])
    for i in range(3):
        logits = data[f"logits_{i}"]
        np.testing.assert_allclose(results[str(i)][1], [1 / (1 + np.exp(logits[no] - logits[yes]))], rtol=1e-4)


def test_activations_by_hand():
    def run(values, activation, **params):
        spec = PoolingSpec(task="embed", pooling="cls", activation=activation)
        return activate(np.asarray(values, np.float32), PoolingParams(**params), spec).tolist()

    assert run([3, 4], "normalize") == pytest.approx([0.6, 0.8])
    assert run([3, 4, 12], "normalize", dimensions=2) == pytest.approx([0.6, 0.8])
    assert run([3, 4], "normalize", use_activation=False) == [3, 4]
    assert run([0, 0], "normalize") == [0, 0]
    assert run([0, -200, 200], "sigmoid") == pytest.approx([0.5, 0, 1])
    assert run([np.log(1), np.log(3)], "softmax") == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_language_model_run_for_vectors_has_the_same_states(name):
    """Every token's state times the head are the logits that transformers computes."""
    with np.load(GOLDENS / name / "golden.npz") as data:
        prompts, logits = [data[f"prompt_{i}"] for i in range(3)], [data[f"logits_{i}"] for i in range(3)]
    core = make_core(name, runner="pooling", max_model_len=128, compile_sizes=[128])
    for i in range(3):
        core.add_request(request(str(i), prompts[i], task="token_embed", use_activation=False))
    results = drain(core)
    head = open_checkpoint(core.config.model).read("lm_head.weight")
    for i in range(3):
        np.testing.assert_allclose(results[str(i)][1].reshape(-1, head.shape[1]) @ head.T, logits[i], atol=2e-3)
