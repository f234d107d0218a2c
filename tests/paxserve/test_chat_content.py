import pytest

from paxserve.chat_content import detect_content_format

LOOP = "{% for part in m.content %}{{ part.text }}{% endfor %}"

STRING = [
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim }}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}",
    "{% for content in documents %}{{ content }}{% endfor %}",
    "{{ messages }}",
    "{% broken",
    "",
]
PARTS = [
    "{% for m in messages %}" + LOOP + "{% endfor %}",
    "{% for m in messages %}" + LOOP.replace("m.content", "m['content']") + "{% endfor %}",
    "{% for m in messages[1:] %}" + LOOP.replace("m.content", "m.content | list") + "{% endfor %}",
    "{% set rest = messages[1:] %}{% for m in rest %}{% set c = m.content %}"
    + LOOP.replace("m.content", "c") + "{% endfor %}",
    "{% set m = messages[0] %}" + LOOP,
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}{% endfor %}",
    "{% macro show(c) %}" + LOOP.replace("m.content", "c") + "{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% for m in messages %}{%- generation %}" + LOOP + "{% endgeneration -%}{% break %}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("template", STRING)
def test_templates_that_read_one_string(template):
    assert detect_content_format(template) == "string"


@pytest.mark.parametrize("template", PARTS)
def test_templates_that_read_parts(template):
    assert detect_content_format(template) == "openai"
