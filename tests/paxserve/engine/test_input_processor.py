import copy
import dataclasses
import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from paxserve.config import ModelConfig
from paxserve.engine.input_processor import InputProcessor, collect_eos_token_ids, prompt_text
from paxserve.errors import ConfigError, RequestError
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.messages import ModelInfo
from paxserve.sampling_params import SamplingParams
from tests.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
HI = TOKENIZER.encode("Hi")
VOCABULARY = 340


def make(*, tokenizer=TOKENIZER, generation_config=None, eos=None, pool=10**6, length=32, **flags):
    return InputProcessor(
        ModelConfig(model="x", **flags),
        tokenizer,
        generation_config or {},
        eos,
        max_model_len=length,
        vocab_size=VOCABULARY,
        max_prompt_tokens=pool,
    )


def refuse(processor, prompt="Hi", params=None, **options):
    with pytest.raises(RequestError) as caught:
        processor.process("r", prompt, params or SamplingParams(), **options)
    assert caught.value.code == 400
    return caught.value


@pytest.mark.parametrize(
    "prompt",
    ["Hi", HI, np.array(HI), tuple(HI), {"prompt": "Hi"}, {"prompt_token_ids": np.array(HI)},
     {"prompt": "ignored", "prompt_token_ids": HI}],
    ids=str,
)  # fmt: skip
def test_every_form_of_prompt(prompt):
    request = make().process("r", prompt, SamplingParams(), arrival_time=3.0)
    assert request.prompt_token_ids == TOKENIZER.encode("Hi")
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)
    assert (request.request_id, request.arrival_time, request.priority) == ("r", 3.0, 0)


def test_text_of_a_prompt():
    assert prompt_text("Hi") == "Hi"
    assert prompt_text({"prompt": "Hi", "prompt_token_ids": [1]}) == "Hi"
    assert prompt_text({"prompt_token_ids": [1]}) is None
    assert prompt_text([1, 2]) is None


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}, {}])
def test_empty_prompts_are_refused(prompt):
    error = refuse(make(), prompt)
    assert (error.message, error.param) == ("The prompt must not be empty.", "prompt")


@pytest.mark.parametrize("prompt", [None, 3, 1.5, [1.5], ["a"], [[1]], [True], [1, None], b"Hi", {"prompt": 3}])
def test_what_is_no_prompt_is_refused(prompt):
    assert refuse(make(), prompt).param == "prompt"


def test_unknown_fields_of_a_prompt_are_refused():
    assert "multi_modal_data" in refuse(make(), {"prompt": "Hi", "multi_modal_data": {}}).message


def test_special_tokens_are_added_unless_told_otherwise():
    processor = make(tokenizer=byte_fallback_tokenizer())
    bos = byte_fallback_tokenizer().bos_token_id
    with_bos = processor.process("r", "the", SamplingParams()).prompt_token_ids
    assert with_bos[0] == bos
    without = processor.process("r", "the", SamplingParams(), add_special_tokens=False).prompt_token_ids
    assert without == with_bos[1:]


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 10**9, 2**31, 2**63, 2**62 + 7, -(2**70)])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    processor = make()
    error = refuse(processor, [5, wrong])
    assert (error.param, str(wrong) in error.message) == ("prompt", True)
    assert refuse(processor, params=SamplingParams(logit_bias={wrong: 1.0})).param == "logit_bias"
    assert refuse(processor, params=SamplingParams(allowed_token_ids=[1, wrong])).param == "allowed_token_ids"
    if wrong >= 0:
        assert refuse(processor, params=SamplingParams(stop_token_ids=[wrong])).param == "stop_token_ids"


def test_the_last_id_of_the_vocabulary_is_accepted():
    last = VOCABULARY - 1
    params = SamplingParams(logit_bias={last: 1.0}, allowed_token_ids=[0, last], stop_token_ids=[last])
    assert make().process("r", [0, last], params).prompt_token_ids == [0, last]


def test_prompt_at_the_context_length():
    processor = make(length=32)
    request = processor.process("r", [5] * 31, SamplingParams(max_tokens=50))
    assert request.params.max_tokens == 1
    for count in (32, 33, 500):
        error = refuse(processor, [5] * count)
        assert error.param == "input_tokens"
        assert error.message == (
            f"This model's maximum context length is 32 tokens. However, your prompt contains {count} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        )


def test_a_text_far_too_long_is_refused_before_it_is_tokenized():
    error = refuse(make(length=32), "x" * (32 * TOKENIZER.max_token_chars + 1))
    assert error.param == "input_text"
    assert "at least 33 input tokens" in error.message


def test_a_prompt_larger_than_the_pool_is_refused():
    processor = make(length=32, pool=10)
    assert processor.process("r", [5] * 10, SamplingParams()).params.max_tokens == 1
    error = refuse(processor, [5] * 11)
    assert error.param == "input_tokens"
    assert "11 tokens, but the KV cache holds only 10" in error.message


@pytest.mark.parametrize(("asked", "given"), [(None, 22), (1, 1), (22, 22), (23, 22), (10**6, 22)])
def test_max_tokens_is_what_is_left_of_the_context(asked, given):
    assert make(length=32).process("r", [5] * 10, SamplingParams(max_tokens=asked)).params.max_tokens == given


def test_min_tokens_follows_a_reduced_max_tokens():
    params = make(length=32).process("r", [5] * 30, SamplingParams(max_tokens=10, min_tokens=8)).params
    assert (params.min_tokens, params.max_tokens) == (2, 2)
    # The engine makes copies of the parameters, which must pass their own checks.
    assert dataclasses.replace(params) == params


@pytest.mark.parametrize(("limit", "kept"), [(3, 3), (31, 31), (None, 20), (100, None), (32, 20), (-1, 20)])
def test_truncation_keeps_the_last_tokens(limit, kept):
    params = SamplingParams(truncate_prompt_tokens=limit)
    prompt = list(range(20))
    if kept is None:
        assert refuse(make(), prompt, params).param == "truncate_prompt_tokens"
    else:
        assert make().process("r", prompt, params).prompt_token_ids == prompt[-kept:]


def test_truncation_to_the_model_leaves_room_for_one_token():
    params = SamplingParams(truncate_prompt_tokens=-1)
    assert make().process("r", list(range(100)), params).prompt_token_ids == list(range(69, 100))
    assert make(pool=8).process("r", list(range(100)), params).prompt_token_ids == list(range(92, 100))
    text = "x" * (32 * TOKENIZER.max_token_chars + 1)
    assert len(make().process("r", text, params).prompt_token_ids) == 31


def test_the_callers_parameters_are_left_alone():
    params = SamplingParams(max_tokens=None, bad_words=["dog"], stop=["x"])
    before = copy.deepcopy(params)
    processor = make(eos=[3])
    first, second = processor.process("a", "Hi", params), processor.process("b", [5] * 9, params)
    assert params == before
    assert first.params is not second.params
    assert (first.params.max_tokens, second.params.max_tokens) == (32 - len(TOKENIZER.encode("Hi")), 23)
    first.params.eos_token_ids.append(9)
    assert second.params.eos_token_ids == processor.eos_token_ids == [1, 3]


def test_bad_words_are_barred_at_the_start_and_after_a_space():
    whole = Tokenizer(Backend(models.WordLevel({"dog": 0, " dog": 1, "fox": 2, "?": 3}, unk_token="?")))
    words = make(tokenizer=whole).process("r", [0], SamplingParams(bad_words=["dog", " dog"])).params
    assert words.bad_words_token_ids == [[0], [1], [0], [1]]
    # A word that the space only lengthens is caught by its plain spelling.
    words = make().process("r", "Hi", SamplingParams(bad_words=["é"])).params.bad_words_token_ids
    assert words == [TOKENIZER.encode("é")]


def test_too_many_bad_words_are_refused():
    assert refuse(make(), params=SamplingParams(bad_words=["日本語" * 20] * 60)).param == "bad_words"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_number_of_logprobs(name):
    def ask(count, **flags):
        return make(**flags).process("r", "Hi", SamplingParams(**{name: count})).params

    assert getattr(ask(20), name) == 20
    assert getattr(ask(0, max_logprobs=0), name) == 0
    assert getattr(ask(-1, max_logprobs=-1), name) == -1
    assert getattr(ask(VOCABULARY, max_logprobs=-1), name) == VOCABULARY
    for count, flags in ((21, {}), (1, {"max_logprobs": 0}), (-1, {}), (VOCABULARY + 1, {"max_logprobs": -1})):
        error = refuse(make(**flags), params=SamplingParams(**{name: count}))
        assert error.param == name
        assert "max allowed" in error.message


def test_eos_ids_come_from_every_source():
    processor = make(generation_config={"eos_token_id": [7, 8, 7]}, eos=9)
    assert processor.eos_token_ids == [1, 9, 7, 8]
    assert processor.process("r", "Hi", SamplingParams()).params.all_stop_token_ids == {1, 7, 8, 9}
    ignoring = processor.process("r", "Hi", SamplingParams(ignore_eos=True, stop_token_ids=[4])).params
    assert ignoring.all_stop_token_ids == {4}
    assert collect_eos_token_ids(None, None, {}, {}) == []
    assert collect_eos_token_ids(None, [2], {"eos_token_id": 3}, {"eos_token_id": [4, 5]}) == [2, 4, 5]
    assert make(eos=[10**6]).eos_token_ids == [1]


def test_without_a_tokenizer_only_ids_are_taken():
    processor = make(tokenizer=None)
    assert processor.process("r", [5], SamplingParams()).prompt_token_ids == [5]
    assert refuse(processor, "Hi").param == "prompt"
    assert refuse(processor, [5], SamplingParams(stop=["x"])).param == "stop"
    assert refuse(processor, [5], SamplingParams(bad_words=["x"])).param == "bad_words"


@pytest.mark.parametrize("salt", ["", "x" * 129, "a/b", "a@b", "a\\b", "a\0b", 5])
def test_cache_salts_that_are_refused(salt):
    assert refuse(make(), cache_salt=salt).param == "cache_salt"


def test_cache_salt_is_passed_on():
    assert make().process("r", "Hi", SamplingParams(), cache_salt="s").cache_salt == "s"
    assert make().process("r", {"prompt": "Hi", "cache_salt": "t"}, SamplingParams()).cache_salt == "t"


def test_priority_and_timeout_are_passed_on():
    request = make().process("r", "Hi", SamplingParams(), priority=-3, timeout=0.5)
    assert (request.priority, request.timeout) == (-3, 0.5)


@pytest.mark.parametrize("fields", [
    {"priority": 1.5}, {"priority": True}, {"priority": 2**63}, {"timeout": 0}, {"timeout": -1.0}, {"timeout": "5"},
    {"timeout": float("nan")}, {"timeout": float("inf")}, {"timeout": True},
])  # fmt: skip
def test_priorities_and_timeouts_that_are_refused(fields):
    assert refuse(make(), **fields).param == next(iter(fields))


GENERATION = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": None,
    "max_new_tokens": 99,
    "do_sample": True,
    "bos_token_id": 1,
}


def test_default_values_come_from_the_generation_config():
    assert make(generation_config=GENERATION).default_sampling_params() == SamplingParams(
        temperature=0.6, top_p=0.9, max_tokens=99
    )


def test_neutral_defaults_and_overrides():
    neutral = InputProcessor(
        ModelConfig(model="x", generation_config="vllm", override_generation_config={"top_k": 5}),
        None, GENERATION, None, max_model_len=9, vocab_size=9, max_prompt_tokens=9,
    )  # fmt: skip
    assert neutral.default_sampling_params() == SamplingParams(top_k=5)
    overridden = make(generation_config=GENERATION, override_generation_config={"temperature": 0.3, "top_p": None})
    assert overridden.default_sampling_params() == SamplingParams(temperature=0.3, max_tokens=99)


def test_default_values_out_of_range_are_refused_at_the_start():
    with pytest.raises(ConfigError, match="temperature must be in"):
        make(override_generation_config={"temperature": 9})


def model_info(**fields):
    values = {
        "max_model_len": 64, "max_sequence_tokens": 48, "vocab_size": VOCABULARY, "num_pages": 3, "page_size": 16,
        "max_num_seqs": 4, "max_num_batched_tokens": 16, "eos_token_ids": [6], "generation_config": {"top_k": 7},
        "dtype": "float32", "num_programs": 1, "startup_seconds": {},
    }  # fmt: skip
    return ModelInfo(**{**values, **fields})


def test_for_model_takes_the_limits_of_the_loaded_model():
    processor = InputProcessor.for_model(ModelConfig(model="x"), TOKENIZER, model_info())
    limits = (processor.max_model_len, processor.max_prompt_tokens, processor.vocab_size)
    assert limits == (64, 48, VOCABULARY)
    assert processor.eos_token_ids == [1, 6]
    assert processor.default_sampling_params() == SamplingParams(top_k=7)


def test_for_model_reads_the_generation_config_of_another_folder(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "eos_token_id": 12}))
    config = ModelConfig(model="x", generation_config=str(tmp_path))
    processor = InputProcessor.for_model(config, TOKENIZER, model_info())
    assert processor.default_sampling_params() == SamplingParams(top_p=0.5)
    assert processor.eos_token_ids == [1, 6, 12]
    with pytest.raises(ConfigError, match="generation_config.json"):
        InputProcessor.for_model(ModelConfig(model="x", generation_config="/nowhere"), TOKENIZER, model_info())
