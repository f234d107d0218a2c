import pytest

from paxserve.engine.output_processor import OutputKind, OutputProcessor
from paxserve.errors import RequestError
from paxserve.messages import EngineOutput, EngineRequest, TokenLogprobs
from paxserve.sampling_params import SamplingParams
from tests.small_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def add(processor, request_id="r", prompt="Hi you", kind=OutputKind.CUMULATIVE, **params):
    params = {"max_tokens": 100, **params}
    request = EngineRequest(
        request_id=request_id, prompt_token_ids=ids(prompt), params=SamplingParams(**params), arrival_time=1.0
    )
    processor.add(request, prompt, kind=kind)
    return request


def out(token_ids, request_id="r", **fields):
    return EngineOutput(request_id=request_id, new_token_ids=list(token_ids), **fields)


def logprobs_of(token_ids):
    return [TokenLogprobs([token_id, 300], [-1.0, -0.5], 2) for token_id in token_ids]


def test_cumulative_outputs_grow_to_the_whole():
    processor = OutputProcessor(TOKENIZER)
    add(processor)
    tokens = ids("lazy dog")
    for count, token_id in enumerate(tokens[:-1], start=1):
        results, aborts = processor.process([out([token_id])])
        assert aborts == []
        assert results[0].outputs[0].token_ids == tokens[:count]
        assert results[0].outputs[0].text == TOKENIZER.decode(tokens[:count])
        assert not results[0].finished
    results, _ = processor.process([out(tokens[-1:], finish_reason="length")])
    (choice,) = results[0].outputs
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("lazy dog", tokens, "length")
    assert choice.stop_reason is None
    assert choice.finished()
    assert results[0].finished
    assert (results[0].prompt, results[0].prompt_token_ids) == ("Hi you", ids("Hi you"))
    assert processor.num_unfinished == 0


def test_deltas_join_to_the_whole():
    processor = OutputProcessor(TOKENIZER)
    add(processor, kind=OutputKind.DELTA, logprobs=1)
    tokens = ids("naïve 日本")
    text, seen, logprobs = "", [], []
    for token_id in tokens:
        is_last = len(seen) == len(tokens) - 1
        results, _ = processor.process(
            [out([token_id], logprobs=logprobs_of([token_id]), finish_reason="length" if is_last else None)]
        )
        (choice,) = results[0].outputs
        text += choice.text
        seen += choice.token_ids
        logprobs += choice.logprobs
    assert (text, seen) == ("naïve 日本", tokens)
    assert [next(iter(position)) for position in logprobs] == tokens
    assert "".join(position[token].decoded_token for position, token in zip(logprobs, tokens, strict=True)) == text
    assert choice.cumulative_logprob == -float(len(tokens))


def test_final_only_tells_nothing_before_the_end():
    processor = OutputProcessor(TOKENIZER)
    add(processor, kind=OutputKind.FINAL_ONLY, n=2)
    assert processor.process([out(ids("the")), out(ids("dog"), index=1, finish_reason="length")]) == ([], [])
    results, _ = processor.process([out(ids(" fox"), finish_reason="length")])
    assert [choice.text for choice in results[0].outputs] == ["the fox", "dog"]
    assert [choice.index for choice in results[0].outputs] == [0, 1]


def test_deltas_of_choices_come_alone_and_the_request_ends_with_the_last():
    processor = OutputProcessor(TOKENIZER)
    add(processor, kind=OutputKind.DELTA, n=2)
    results, _ = processor.process([out(ids("the"), index=1, finish_reason="length")])
    assert [choice.index for choice in results[0].outputs] == [1]
    assert not results[0].finished
    results, _ = processor.process([out(ids("dog"), index=0, finish_reason="length")])
    assert [(choice.index, choice.text) for choice in results[0].outputs] == [(0, "dog")]
    assert results[0].finished


def test_several_outputs_of_one_step_make_one_result():
    processor = OutputProcessor(TOKENIZER)
    add(processor, n=2)
    add(processor, "other")
    results, _ = processor.process([out(ids("the")), out(ids("dog"), "other"), out(ids("fox"), index=1)])
    assert [result.request_id for result in results] == ["r", "other"]
    assert [choice.text for choice in results[0].outputs] == ["the", "fox"]


def test_a_stop_string_ends_the_output_at_its_token():
    processor = OutputProcessor(TOKENIZER)
    add(processor, stop=["zy"], logprobs=0)
    tokens = ids("lazy dog")
    results, aborts = processor.process([out(tokens, logprobs=[TokenLogprobs([t], [-1.0], 1) for t in tokens])])
    (choice,) = results[0].outputs
    count = len(choice.token_ids)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("la", "stop", "zy")
    assert choice.token_ids == tokens[:count]
    assert 0 < count < len(tokens)
    assert "zy" in TOKENIZER.decode(choice.token_ids)
    assert len(choice.logprobs) == count
    assert choice.cumulative_logprob == -float(count)
    assert results[0].finished
    assert aborts == [("r", None)]
    # What was on its way, and the core's own end, are dropped.
    assert processor.process([out(ids("x")), out([], finish_reason="abort")]) == ([], [])


def test_one_stopped_choice_is_aborted_alone():
    processor = OutputProcessor(TOKENIZER)
    add(processor, stop=["g"], n=3)
    results, aborts = processor.process([out(ids("dog"), index=1), out(ids("the"), index=0)])
    assert aborts == [("r", 1)]
    assert [choice.text for choice in results[0].outputs] == ["the", "do", ""]
    assert [choice.finish_reason for choice in results[0].outputs] == [None, "stop", None]
    _, aborts = processor.process([out(ids("dog"), index=0), out(ids("dog"), index=2), out(ids("z"), index=1)])
    assert aborts == [("r", None)]
    assert processor.num_unfinished == 0


def test_nothing_is_aborted_when_the_core_has_ended_it_too():
    processor = OutputProcessor(TOKENIZER)
    add(processor, stop=["g"])
    results, aborts = processor.process([out(ids("dog"), finish_reason="length")])
    assert aborts == []
    assert (results[0].outputs[0].finish_reason, results[0].outputs[0].stop_reason) == ("stop", "g")


@pytest.mark.parametrize("kind", list(OutputKind))
def test_text_held_for_a_stop_string_comes_at_the_end(kind):
    processor = OutputProcessor(TOKENIZER)
    add(processor, stop=["dogma"], kind=kind)
    text = ""
    for token_id in ids("the dog")[:-1]:
        results, _ = processor.process([out([token_id])])
        text += results[0].outputs[0].text if kind is OutputKind.DELTA else ""
    results, _ = processor.process([out(ids("the dog")[-1:], finish_reason="length")])
    assert text + results[0].outputs[0].text == "the dog"


@pytest.mark.parametrize(("keep", "text"), [(False, "Hi"), (True, "Hi<|im_end|>")])
def test_the_stop_token_is_kept_as_id_but_not_as_text(keep, text):
    processor = OutputProcessor(TOKENIZER)
    add(processor, include_stop_str_in_output=keep, skip_special_tokens=False)
    results, aborts = processor.process([out([*ids("Hi"), 1], finish_reason="stop")])
    (choice,) = results[0].outputs
    assert (choice.text, choice.token_ids, choice.stop_reason) == (text, [*ids("Hi"), 1], None)
    assert aborts == []


def test_an_ordinary_stop_token_is_not_in_the_text():
    processor = OutputProcessor(TOKENIZER)
    (token_id,) = ids("z")
    add(processor, stop_token_ids=[token_id])
    results, _ = processor.process([out([*ids("Hi"), token_id], finish_reason="stop", stop_reason=token_id)])
    assert (results[0].outputs[0].text, results[0].outputs[0].stop_reason) == ("Hi", token_id)


def test_prompt_logprobs_have_the_prompt_token_at_each_position():
    processor = OutputProcessor(TOKENIZER)
    request = add(processor, prompt_logprobs=1, kind=OutputKind.DELTA)
    entries = [None, *(TokenLogprobs([token, 9], [-3.0, -1.0], 5) for token in request.prompt_token_ids[1:])]
    results, _ = processor.process([out(ids("x"), prompt_logprobs=entries)])
    first, *rest = results[0].prompt_logprobs
    assert first is None
    assert len(rest) == len(request.prompt_token_ids) - 1 > 2
    for token_id, position in zip(request.prompt_token_ids[1:], rest, strict=True):
        assert (position[token_id].logprob, position[token_id].rank) == (-3.0, 5)
        assert position[9].rank == 1
    # A stream tells them once.
    results, _ = processor.process([out(ids("y"), finish_reason="length")])
    assert results[0].prompt_logprobs is None


def test_prompt_logprobs_of_the_wrong_length_are_a_bug_that_shows():
    processor = OutputProcessor(TOKENIZER)
    add(processor, prompt_logprobs=1)
    with pytest.raises(ValueError, match="zip"):
        processor.process([out(ids("x"), prompt_logprobs=[None])])


def test_times_and_counts_are_noted():
    processor = OutputProcessor(TOKENIZER)
    add(processor)
    first, _ = processor.process([out(ids("a"), first_scheduled_time=2.0, num_cached_tokens=4)])
    last, _ = processor.process([out(ids("b"), first_scheduled_time=2.0, finish_reason="length", num_preemptions=3)])
    before, metrics = first[0].metrics, last[0].metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.num_preemptions) == (1.0, 2.0, 3)
    assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    assert (before.finished_time, before.first_token_time) == (None, metrics.first_token_time)
    assert last[0].num_cached_tokens == 4


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_without_text_ids_and_logprobs_still_come(with_tokenizer):
    processor = OutputProcessor(TOKENIZER if with_tokenizer else None)
    add(processor, logprobs=1, detokenize=not with_tokenizer)
    results, _ = processor.process([out([5, 6], logprobs=logprobs_of([5, 6]), finish_reason="stop")])
    (choice,) = results[0].outputs
    assert (choice.text, choice.token_ids) == ("", [5, 6])
    assert choice.logprobs[0][5].decoded_token is None
    assert choice.logprobs[0][300].logprob == -0.5


def test_abort_returns_what_there_was():
    processor = OutputProcessor(TOKENIZER)
    add(processor, stop=["xyz"])
    add(processor, "other")
    processor.process([out(ids("foxx"))])
    (result,) = processor.abort(["r", "unknown"])
    (choice,) = result.outputs
    assert (choice.text, choice.finish_reason, result.finished) == ("foxx", "abort", True)
    assert processor.request_ids() == ["other"]
    assert processor.process([out(ids("z"))]) == ([], [])


def test_an_id_in_use_is_refused():
    processor = OutputProcessor(TOKENIZER)
    add(processor)
    with pytest.raises(RequestError, match="'r' is in use") as caught:
        add(processor)
    assert caught.value.param == "request_id"
