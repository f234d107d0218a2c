import asyncio
import time

import pytest

from paxserve.entrypoints.template_renderer import TemplateRenderer
from paxserve.errors import RequestError
from tests.paxserve.entrypoints.test_errors import check_shape
from tests.paxserve.serving import Serving, run
from tests.small_tokenizers import byte_level_tokenizer

USER = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
HUNGRY = "{{ ('x' * 99999999) * 999 }}"
LONG = "{% for a in range(9999) %}{{ 'x' * 100 }}{% endfor %}"


def render(*templates: str | None, **limits):
    async def main():
        renderer = TemplateRenderer(byte_level_tokenizer(), **{"seconds": 10.0, "max_characters": 10_000, **limits})
        try:
            return [await renderer.render(USER, chat_template=template) for template in templates]
        finally:
            renderer.close()

    return asyncio.run(main())


def test_it_renders_what_is_rendered_here():
    assert render(None, "{{ messages[0].content }}, {{ eos_token }}") == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "Hi, <|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "words", "param"),
    [
        ("{{ raise_exception('no roles') }}", "no roles", "messages"), ("{% for", "not valid Jinja", "chat_template"),
        (HUNGRY, "too much memory", "messages"), (LONG, "more than 10000 characters", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe", "messages"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe", "messages"),
        ("{% include '/etc/passwd' %}", "refuses", "messages"), ("{% import 'os' as os %}", "refuses", "messages"),
    ],
)  # fmt: skip
def test_what_a_template_must_not_do(template, words, param):
    with pytest.raises(RequestError, match=words) as error:
        render(template)
    assert error.value.param == param


def test_a_template_without_end_is_killed_and_the_next_one_renders():
    async def main():
        renderer = TemplateRenderer(byte_level_tokenizer(), seconds=1.0, max_characters=1000)
        started = time.monotonic()
        try:
            with pytest.raises(RequestError, match="more than 1 seconds"):
                await renderer.render(USER, chat_template=ENDLESS)
            assert time.monotonic() - started < 5
            return await renderer.render(USER, chat_template="{{ messages[0].content }}")
        finally:
            renderer.close()

    assert asyncio.run(main()) == "Hi"


@pytest.mark.parametrize("where", ["field", "kwargs"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_templates_of_requests_are_refused_by_default(path, where):
    template = {"chat_template": "{{ 1 }}"}

    async def test(served: Serving):
        return await served.post(
            path, messages=USER, **(template if where == "field" else {"chat_template_kwargs": template})
        )

    error = check_shape(run(test), 400)
    assert "chat_template" in error["message"]
    if where == "kwargs":
        check_shape(run(test, trust_request_chat_template=True), 400)


def test_a_trusted_template_is_used():
    async def test(served: Serving):
        body = {"messages": USER, "chat_template": "Say: {{ messages[0].content }}"}
        shown = (await served.post("/tokenize", **body)).json()["tokens"]
        return (await served.post("/detokenize", tokens=shown)).json(), await served.chat(chat_template=ENDLESS)

    shown, endless = run(test, trust_request_chat_template=True, chat_template_timeout=1.0)
    assert shown == {"prompt": "Say: Hi"}
    assert "more than 1 seconds" in check_shape(endless, 400)["message"]


def test_long_conversations_are_rendered_outside_too():
    async def test(served: Serving):
        messages = [{"role": "user", "content": "word " * 100}] * 20
        body = {"messages": messages, "return_token_strs": False}
        long = (await served.post("/tokenize", **body)).json()["count"]
        return long, (await served.post("/tokenize", messages=messages[:1])).json()["count"]

    long, short = run(test)
    assert long > 15 * short
