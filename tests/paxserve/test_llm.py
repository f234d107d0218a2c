import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import paxserve.llm
from paxserve import LLM, BeamSearchParams, ConfigError, EngineDeadError, RequestError, SamplingParams
from tests.engine_driver import golden_data
from tests.paxserve.fake_core import SCRIPT, FakeCore
from tests.small_tokenizers import byte_level_tokenizer

GOLDENS = Path(__file__).parents[1] / "goldens"
TOKENIZER = byte_level_tokenizer()
PER_ROUND = len(TOKENIZER.encode(SCRIPT))


class ScriptedCore(FakeCore):
    """A scripted core whose step a test can make go wrong."""

    before_step = None

    def step(self):
        self.step_seconds = 0
        if self.before_step is not None:
            self.before_step()
        return super().step()


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setattr(paxserve.llm, "open_core", ScriptedCore)
    monkeypatch.setattr(paxserve.llm, "open_tokenizer", lambda config: TOKENIZER)
    return LLM("scripted", override_generation_config={"temperature": 0.5, "max_new_tokens": 7})


def texts(results):
    return [[choice.text for choice in result.outputs] for result in results]


def assert_idle(llm):
    assert llm._outputs.num_unfinished == 0
    assert not llm._core.has_unfinished_requests()
    assert llm.stats().num_running == 0
    # And it still works.
    (result,) = llm.generate("again", SamplingParams(max_tokens=PER_ROUND), use_tqdm=False)
    assert result.outputs[0].text == SCRIPT


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("Hi", [TOKENIZER.encode("Hi")]),
        ({"prompt": "Hi"}, [TOKENIZER.encode("Hi")]),
        ([5, 6], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ({"prompt_token_ids": [5]}, [[5]]),
        (["Hi", {"prompt_token_ids": [5]}, [6]], [TOKENIZER.encode("Hi"), [5], [6]]),
        ([], []),
    ],
)
def test_every_form_of_prompts(llm, prompts, ids):
    results = llm.generate(prompts, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == ids
    assert all(result.finished and result.outputs[0].finish_reason == "length" for result in results)
    # The defaults are the model's own.
    assert all(len(result.outputs[0].token_ids) == 7 for result in results)


def test_results_come_in_the_order_of_prompts(llm):
    lengths = [9, 2, 30, 1, 9]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    results = llm.generate([f"prompt {length}" for length in lengths], params, use_tqdm=False)
    assert [result.prompt for result in results] == [f"prompt {length}" for length in lengths]
    assert [len(result.outputs[0].token_ids) for result in results] == lengths
    assert len({result.request_id for result in results}) == len(lengths)


def test_choices_stop_strings_and_logprobs(llm):
    params = SamplingParams(n=3, max_tokens=60, stop=["é 😀"], logprobs=1, prompt_logprobs=0)
    (result,) = llm.generate("Hi you", params, use_tqdm=False)
    assert texts([result]) == [["One two three, caf"] * 3]
    for choice in result.outputs:
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "é 😀")
        assert len(choice.logprobs) == len(choice.token_ids)
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert llm.stats().num_running == 0


def test_default_parameters_are_fresh_each_time(llm):
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.5, max_tokens=7)
    params.max_tokens = 1
    assert llm.get_default_sampling_params().max_tokens == 7


@pytest.mark.parametrize("params", [[SamplingParams()], [SamplingParams()] * 3, {"n": 1}, [1, 2], "x"])
def test_parameters_that_do_not_fit_are_refused(llm, params):
    with pytest.raises(RequestError, match="sampling_params must be"):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert_idle(llm)


@pytest.mark.parametrize("bad", [[-1], [10**9], "", [], "x" * 100000, [5] * 600, "please refuse", None])
def test_one_bad_prompt_among_good_ones_stops_all(llm, bad):
    with pytest.raises(RequestError):
        llm.generate(["good", "good too", bad, "more"], use_tqdm=False)
    assert llm.stats().num_steps == 0 or bad == "please refuse"
    assert_idle(llm)


def test_a_failing_step_leaves_nothing_behind(llm):
    llm._core.before_step = iter([None, None]).__next__
    with pytest.raises(StopIteration):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
    llm._core.before_step = None
    assert_idle(llm)


def test_a_core_that_forgets_a_request_does_not_hang_the_caller(llm):
    llm._core.before_step = lambda: llm._core.choices.clear()
    with pytest.raises(EngineDeadError):
        llm.generate("a", use_tqdm=False)
    llm._core.before_step = None
    assert_idle(llm)


def test_interrupt_waits_for_the_step_and_leaves_nothing_behind(llm):
    finished = []

    def interrupt():
        if llm._core.counters.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        finished.append(llm._core.counters.num_steps)

    llm._core.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
    llm._core.before_step = None
    # The step that was interrupted was carried through.
    assert finished == [0, 1, 2, 3]
    assert llm._core.counters.num_steps == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm)


def test_an_interrupt_in_the_last_step_is_not_lost(llm):
    llm._core.before_step = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    llm._core.before_step = None
    assert_idle(llm)


def test_works_outside_the_main_thread(llm):
    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate("a", use_tqdm=False)))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_progress_shows_requests_and_tokens(llm, capsys):
    llm.generate(["a", "b"])
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "2/2" in shown
    assert "toks/s input:" in shown
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_progress_can_be_of_another_make(llm):
    bars = []

    def make_bar(**options):
        bars.append(paxserve.llm.tqdm(**options, disable=True))
        return bars[-1]

    llm.generate(["a", "b"], use_tqdm=make_bar)
    assert bars[0].total == 2


USER = {"role": "user", "content": "Hi"}


def test_chat_renders_one_conversation_or_many(llm):
    (result,) = llm.chat([USER], use_tqdm=False)
    assert result.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(result.prompt_token_ids, skip_special_tokens=False) == result.prompt
    both = llm.chat([[USER], [USER, {"role": "assistant", "content": "Ho"}, USER]], use_tqdm=False)
    assert [r.prompt.count("Hi") for r in both] == [1, 2]


def test_chat_options_reach_the_template(llm):
    template = "{{ mood }}{{ tools[0].name }}{{ messages[0].content }}{{ add_generation_prompt }}"
    (result,) = llm.chat(
        [USER], use_tqdm=False, chat_template=template, add_generation_prompt=False, tools=[{"name": "T"}],
        chat_template_kwargs={"mood": "glad "},
    )  # fmt: skip
    assert result.prompt == "glad THiFalse"
    open_end = [USER, {"role": "assistant", "content": "So"}]
    (result,) = llm.chat(open_end, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert result.prompt.endswith("assistant\nSo")


@pytest.mark.parametrize("messages", [[], "Hi", USER, [[]], [[USER], []], [USER, [USER]], None])
def test_bad_conversations_are_refused(llm, messages):
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, use_tqdm=False)
    assert caught.value.param == "messages"
    assert_idle(llm)


def test_prefix_cache_can_be_reset(llm):
    assert llm.reset_prefix_cache()
    assert llm._core.resets == 1


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match="Did you mean max_model_len"):
        LLM("scripted", max_modl_len=5)


@pytest.fixture(scope="module")
def golden():
    return LLM(
        str(GOLDENS / "llama"), skip_tokenizer_init=True, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=8,
        num_gpu_blocks_override=40, compilation_cache_dir="",
    )  # fmt: skip


def test_ids_only_with_the_real_engine(golden):
    data = golden_data("llama")
    prompts = [{"prompt_token_ids": data[f"prompt_{i}"]} for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    results = golden.generate(prompts, params, use_tqdm=False)
    for place, result in enumerate(results):
        (choice,) = result.outputs
        assert choice.token_ids == list(data[f"greedy_{place}"])
        assert (choice.text, choice.finish_reason, result.prompt) == ("", "length", None)
        assert choice.logprobs[0][choice.token_ids[0]].rank == 1
        assert choice.logprobs[0][choice.token_ids[0]].decoded_token is None
        assert result.metrics.arrival_time <= result.metrics.first_scheduled_time <= result.metrics.first_token_time
    stats = golden.stats()
    assert (stats.num_running, stats.num_pages_in_use, stats.recompilations) == (0, 0, 0)


def test_one_beam_is_greedy_and_two_are_those_of_transformers(golden):
    data, (case, *_) = golden_data("llama"), json.loads((GOLDENS / "beams.json").read_text())["llama"]
    prompts = [data["prompt_0"].tolist(), data["prompt_1"].tolist()]
    single = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
    for place, found in enumerate(golden.beam_search(prompts, single)):
        (greedy,) = found.sequences
        expected = data[f"greedy_{place}"].tolist()
        assert greedy.tokens == [*prompts[place], *expected]
        assert [next(iter(entries)) for entries in greedy.logprobs] == expected
        assert (greedy.text, greedy.finish_reason, greedy.score) == ("", "length", greedy.cum_logprob / 12)
    assert (case["prompt"], case["beam_width"], case["eos_token_ids"]) == (prompts[0], 2, [])
    params = BeamSearchParams(
        beam_width=2, max_tokens=case["max_tokens"], ignore_eos=True, length_penalty=case["length_penalty"]
    )
    (found,) = golden.beam_search([prompts[0]], params)
    assert [sequence.tokens for sequence in found.sequences] == [prompts[0] + tokens for tokens in case["sequences"]]
    assert [sequence.score for sequence in found.sequences] == pytest.approx(case["scores"], abs=1e-3)
    with pytest.raises(RequestError, match="at most max_num_seqs=2"):
        golden.beam_search(prompts, BeamSearchParams(beam_width=3))
    with pytest.raises(RequestError, match="30 beams look at 31 tokens"):
        golden.beam_search(prompts, BeamSearchParams(beam_width=30))
    assert golden.stats().num_running == 0


def test_text_needs_the_tokenizer(golden):
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        golden.generate("Hi", use_tqdm=False)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        golden.chat([USER], use_tqdm=False)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        golden.get_tokenizer()


def test_the_real_engine_is_idle_after_an_interrupt(golden, monkeypatch):
    step, count = golden._core.step, iter(range(10**6))

    def interrupted_step():
        if next(count) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(golden._core, "step", interrupted_step)
    params = SamplingParams(n=2, max_tokens=60, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        golden.generate([[5] * 20, [6] * 20, [7] * 20], params, use_tqdm=False)
    stats = golden.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_in_use) == (0, 0, 0)
    assert not golden._core.has_unfinished_requests()
    golden._core.check_integrity()


def test_the_real_engine_refuses_all_when_one_prompt_is_too_long(golden):
    with pytest.raises(RequestError, match="maximum context length is 128"):
        golden.generate([[5], [5] * 128], use_tqdm=False)
    assert golden.stats().num_waiting == 0
