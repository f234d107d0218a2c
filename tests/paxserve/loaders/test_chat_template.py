import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paxserve.errors import RequestError
from paxserve.loaders.chat_template import render_chat

CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'break' %}{% break %}{% endif %}\n"
    "    <|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}\n"
    "{%- if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}</s>{% endfor %}"
CHAT = [{"role": "user", "content": "Is 1 < 2 & 'so'? é"}, {"role": "assistant", "content": "Yes, it is "}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>é</b> & 'x'"}}]


@pytest.mark.parametrize("template", [CHATML, TRIMMING, GENERATION])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("continues", [False, True])
def test_same_text_as_transformers(template, tools, continues):
    options = {"tools": tools, "add_generation_prompt": not continues, "bos_token": "<s>"}
    (expected,), _ = render_jinja_template([CHAT], chat_template=template, continue_final_message=continues, **options)
    assert render_chat(template, CHAT, continue_final_message=continues, **options) == expected


def test_continues_the_last_text_part():
    chat = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert render_chat(PARTS, chat, continue_final_message=True) == "one;two"
    assert chat[0]["content"][1]["text"] == "two"


@pytest.mark.parametrize("chat", [[], [{"role": "user"}], [{"role": "user", "content": []}]])
def test_nothing_to_continue(chat):
    with pytest.raises(RequestError, match="needs a last message with text") as caught:
        render_chat(CHATML, chat, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_template_that_drops_the_final_message():
    with pytest.raises(RequestError, match="drops the end of the last message"):
        render_chat("{{ messages[0].content }}", CHAT, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "not valid Jinja"),
        ("{{ 1 | nosuchfilter }}", "not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ 'a' + 1 }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        ("{{ nothing.at.all }}", "refuses these messages"),
        ("{{ range(10**9) | list }}", "refuses these messages"),
        ("{% set _ = messages.append(1) %}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_a_failing_template_is_a_request_error(template, message):
    with pytest.raises(RequestError, match=message):
        render_chat(template, CHAT)


def test_strftime_now():
    assert render_chat("{{ strftime_now('%Y') }}", CHAT).startswith("20")


def test_tojson_escapes_no_html():
    assert json.loads(render_chat("{{ messages | tojson }}", CHAT)) == CHAT
    assert "é" in render_chat("{{ messages | tojson }}", CHAT)
