import json

import pytest

from paxserve.entrypoints.errors import body_of
from paxserve.errors import EngineDeadError, RequestError
from tests.paxserve.fake_core import CRASH, REFUSE
from tests.paxserve.serving import Serving, run

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def check_shape(response, code, kind=None):
    assert response.status_code == code, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    if kind is not None:
        assert error["type"] == kind
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "raw", [b"[]", b"true", b"null", b"123", b'"x"', b"{}", b"{", b"", b"\xff\xfe", b"[" * 100_000]
)
def test_bodies_that_are_no_request(path, raw):
    async def test(served: Serving):
        return await served.http.post(path, content=raw, headers={"Content-Type": "application/json"})

    check_shape(run(test), 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1}, {"max_tokens": 0}, {"max_tokens": "x"}, {"temperature": "hot"}, {"temperature": 3},
        {"top_p": 2}, {"n": 0}, {"n": -1}, {"n": 129}, {"prompt": {"a": 1}}, {"prompt": [1.5]}, {"prompt": None},
        {"prompt": ""}, {"prompt": []}, {"prompt": [True]}, {"prompt": [[]]}, {"prompt": ["a", ""]}, {"stop": 5},
        {"stop": list("abcde")}, {"stop": [""]}, {"logprobs": -5}, {"logprobs": 21}, {"stream": "maybe"},
        {"min_tokens": 20, "max_tokens": 5}, {"seed": "a"}, {"seed": 2**63}, {"logit_bias": [1]},
        {"logit_bias": {"x": 1}}, {"logit_bias": {"1000000": 1}}, {"prompt": [-1]}, {"prompt": [10**9]},
        {"prompt": [[5], [2**63]]}, {"prompt": [2**62 + 7]}, {"cache_salt": ""}, {"cache_salt": 5},
        {"cache_salt": "a/b"}, {"request_id": "a\nb"}, {"prompt": [5] * 512}, {"prompt": ["x"] * 1025},
        {"prompt": ["x"] * 1024, "n": 3}, {"stream_options": {"include_usage": True}},
        {"stream": True, "prompt_logprobs": 1}, {"stream": True, "stream_options": {"colour": 1}},
        {"best_of": 2}, {"suffix": "x"}, {"guided_regex": "a"}, {"length_penalty": 2.0}, {"priority": 1.5},
        {"prompt_embeds": "AAAA"}, {"structured_outputs": {"regex": "[a-"}}, {"temprature": 1}, {"lora_name": "x"},
    ],
)  # fmt: skip
def test_fields_out_of_range_are_refused_before_anything_runs(fields):
    async def test(served: Serving):
        plain = await served.post("/v1/completions", **{"prompt": "Hi", **fields})
        stream = await served.post("/v1/completions", **{"prompt": "Hi", "stream": True, **fields})
        return plain, stream, served.client.added

    plain, stream, added = run(test)
    error = check_shape(plain, 400)
    assert any(name in str(error) for name in (*fields, "input_tokens"))
    if "stream_options" not in fields:
        check_shape(stream, 400)
        assert not added


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": TEXT}', '{"prompt": "x", "stop": TEXT}', '{"prompt": "x", "stop": [TEXT]}',
        '{"prompt": "x", "model": TEXT}', '{"prompt": "x", TEXT: 1}', '{"prompt": "x", "bad_words": [TEXT]}',
        '{"prompt": "x", "max_tokens": TEXT}', '{"prompt": "x", "logit_bias": {TEXT: 1}}',
        '{"prompt": ["x", TEXT]}', '{"prompt": "x", "cache_salt": TEXT}', '{"prompt": "x", "request_id": TEXT}',
    ],
)  # fmt: skip
def test_half_a_character_is_refused_and_leaves_nothing_behind(body):
    async def test(served: Serving):
        raw = body.replace("TEXT", '"\\ud800x"').encode()
        response = await served.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
        return response, served.engine.num_unfinished, served.engine.output_processor.num_unfinished

    response, unfinished, processing = run(test)
    check_shape(response, 400)
    assert (unfinished, processing) == (0, 0)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "presence_penalty", "top_p", "max_tokens"])
def test_numbers_that_are_not_finite_are_refused(number, field):
    async def test(served: Serving):
        raw = f'{{"prompt": "Hi", "{field}": {number}}}'
        return await served.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})

    check_shape(run(test), 400)


def test_typing_errors_have_the_location_and_a_bounded_message():
    async def test(served: Serving):
        hot = await served.complete(temperature="hot")
        many = await served.post("/v1/chat/completions", messages=[{"role": 5, "content": "x" * 10_000}] * 500)
        big = await served.complete(prompt=["x" * 1000, 5] * 10_000)
        return hot, many, big

    hot, many, big = run(test)
    error = check_shape(hot, 400, "Bad Request")
    assert error["param"] == "body.temperature"
    assert error["message"].startswith("1 validation error:\n  {'type': 'float_parsing', 'loc': 'body.temperature', ")
    error = check_shape(many, 400, "Bad Request")
    assert error["message"].startswith("500 validation errors:")
    assert len(many.content) < 6000
    check_shape(big, 400, "Bad Request")
    assert len(big.content) < 6000


def test_our_own_checks_name_the_parameter():
    async def test(served: Serving):
        return await served.complete(temperature=3)

    error = check_shape(run(test), 400, "BadRequestError")
    assert error["param"] == "temperature"
    assert "[0, 2]" in error["message"]


def test_a_model_that_is_not_served():
    async def test(served: Serving):
        wrong = [await served.complete(model="other"), await served.chat(model="other")]
        wrong += [await served.post("/tokenize", prompt="x", model="other"), await served.http.get("/v1/models/other")]
        right = [await served.complete(model=name, max_tokens=1) for name in ("b", "a", "", None)]
        return wrong, right

    wrong, right = run(test, served_model_name=["a", "b"])
    for response in wrong:
        error = check_shape(response, 404, "NotFoundError")
        assert error["message"] == "The model `other` does not exist. Valid aliases: a, b."
        assert error["param"] == "model"
    assert [response.json()["model"] for response in right] == ["b", "a", "a", "a"]


def test_unknown_paths_and_methods():
    async def test(served: Serving):
        return await served.http.get("/v1/nothing"), await served.http.get("/v1/completions")

    missing, wrong_method = run(test)
    check_shape(missing, 404, "NotFoundError")
    check_shape(wrong_method, 405, "MethodNotAllowedError")
    assert wrong_method.headers["allow"] == "POST"


def test_bodies_that_are_too_large():
    async def test(served: Serving):
        told = await served.complete("x" * 2000)

        async def pieces():
            for _ in range(100):
                yield b"x" * 100

        json_type = {"Content-Type": "application/json"}
        counted = await served.http.post("/v1/completions", content=pieces(), headers=json_type)
        return told, counted, await served.complete("x", max_tokens=1)

    told, counted, fine = run(test, max_request_body_bytes=1000)
    check_shape(told, 413)
    check_shape(counted, 413)
    assert fine.status_code == 200


def test_a_body_of_another_type_is_no_json():
    async def test(served: Serving):
        return await served.http.post(
            "/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}
        )

    check_shape(run(test), 400)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_only_the_core_refuses_still_gets_a_status(is_stream):
    async def test(served: Serving):
        refused = await served.complete(["Hi", REFUSE, "there"], stream=is_stream)
        return refused, served.core.choices, await served.complete("x", max_tokens=1)

    refused, running, after = run(test)
    error = check_shape(refused, 400, "BadRequestError")
    assert error["message"] == "This prompt can never run."
    assert not running
    assert after.status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_when_the_core_dies_everybody_is_told(is_stream):
    async def test(served: Serving):
        health = (await served.http.get("/health")).status_code
        died = await served.complete(CRASH, stream=is_stream)
        later = await served.complete("x")
        return health, died, later, (await served.http.get("/health")), (await served.http.get("/metrics")).text

    before, died, later, health, metrics = run(test)
    assert before == 200
    error = check_shape(died, 500, "InternalServerError")
    assert "the device is on fire" in error["message"]
    check_shape(later, 500)
    assert health.status_code == 503
    assert not health.content
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in metrics


def test_an_error_in_mid_stream_is_its_last_event():
    async def test(served: Serving):
        advance = served.core.advance

        def fail_later(key, choice):
            if choice.num_tokens == 5:
                raise RuntimeError("the device is on fire")
            return advance(key, choice)

        served.core.advance = fail_later  # type: ignore[method-assign]
        return await served.chat(max_tokens=50, stream=True)

    response = run(test)
    assert response.status_code == 200
    blocks = response.text.split("\n\n")
    assert blocks[-2] == "data: [DONE]"
    error = json.loads(blocks[-3].removeprefix("data: "))["error"]
    assert error["code"] == 500
    assert "the device is on fire" in error["message"]


def test_a_bug_is_not_told_to_clients():
    async def test(served: Serving):
        served.engine.input_processor = None  # type: ignore[assignment]
        return await served.complete("x")

    error = check_shape(run(test), 500, "InternalServerError")
    assert "NoneType" not in error["message"]


@pytest.mark.parametrize(
    ("limits", "fields", "words"),
    [
        ({"max_prompts": 2}, {"prompt": ["a"] * 3}, "at most 2 entries, got 3"),
        ({"max_choices": 5}, {"prompt": ["a"] * 3, "n": 2, "temperature": 1}, "at most 5, got 6"),
        ({"max_n": 3}, {"n": 4, "temperature": 1}, "n must be at most 3"),
        ({"max_stop_strings": 1}, {"stop": ["a", "b"]}, "stop must have at most 1 strings"),
        ({"max_stop_strings": 0}, {"stop": "a"}, "stop must have at most 0 strings"),
        ({"max_bad_words": 2}, {"bad_words": ["a", "b", "c"]}, "bad_words must have at most 2 words"),
        ({}, {"bad_words": ["a"] * 129}, "bad_words must have at most 128 words"),
        ({}, {"n": 129}, "n must be at most 128"), ({}, {"n": 10**30}, "n must be at most 128"),
        ({}, {"stop": list("abcde")}, "stop must have at most 4 strings"),
        ({}, {"bad_words": ["😀" * 600]}, "at most 1024 tokens"),
    ],
)  # fmt: skip
def test_each_limit_is_a_setting_and_is_checked_before_anything_runs(limits, fields, words):
    async def test(served: Serving):
        return await served.complete(**{"prompt": "a", "stream": True, **fields}), served.client.added

    refused, added = run(test, **limits)
    assert words in check_shape(refused, 400)["message"]
    assert not added


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cannot open /usr/lib/python3/site-packages/x.py", "cannot open <path>"),
        ("<object at 0x7f3a12345678>", "<object at <address>>"),
        ('x\nTraceback (most recent call last):\n  File "a.py", line 3\nboom', "x\n<traceback>"),
        ('see File "/srv/app/x.py", line 12, in run', "see <traceback>"),
        (
            "use /v1 or and/or 1/2, see https://example.org/a/b/c",
            "use /v1 or and/or 1/2, see https://example.org/a/b/c",
        ),
    ],
)
@pytest.mark.parametrize("kind", [RequestError, EngineDeadError])
def test_no_message_tells_of_the_machine(text, told, kind):
    assert body_of(kind(text)).error.message == told


def test_a_template_that_fails_tells_no_path():
    async def test(served: Serving):
        return await served.chat()

    template = "{{ raise_exception('in /srv/models/secret/chat.jinja at 0x7fffdeadbeef') }}"

    async def with_template(served: Serving):
        served.context.chat_template = template
        return await test(served)

    message = check_shape(run(with_template), 400)["message"]
    assert "<path>" in message
    assert "secret" not in message
    assert "deadbeef" not in message
