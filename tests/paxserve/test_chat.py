import pytest

from paxserve.chat import encode_chat, normalize_messages, render_chat, render_chat_text
from paxserve.errors import RequestError
from tests.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer, word_piece_tokenizer

TOKENIZER = byte_level_tokenizer()
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SHOW_CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "<{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}|"
    "{% endfor %}"
)
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.type }} {{ part.text }}]{% endfor %}|{% endfor %}"


def refuse(messages, **options):
    with pytest.raises(RequestError) as caught:
        render_chat_text(TOKENIZER, messages, **options)
    return caught.value


def test_text_and_ids_of_a_conversation():
    text = render_chat_text(TOKENIZER, [{"role": "system", "content": "Be brief."}, USER])
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    token_ids = render_chat(TOKENIZER, [{"role": "system", "content": "Be brief."}, USER])
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == text
    assert token_ids.count(0) == 3
    assert render_chat_text(TOKENIZER, [USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("add", [False, True])
def test_bos_is_there_once(add):
    tokenizer = byte_fallback_tokenizer()
    bos = tokenizer.bos_token_id
    token_ids = render_chat(tokenizer, [USER], add_special_tokens=add)
    assert token_ids[0] == bos
    assert bos not in token_ids[1:]
    # A template without one gets it only on request.
    assert (encode_chat(tokenizer, "the", add_special_tokens=add)[0] == bos) == add


SHAPES = {
    "null content": ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "assistant:<f a=1>|"),
    "no content": ({"role": "assistant", "tool_calls": [CALL]}, "assistant:<f a=1>|"),
    "empty parts": ({"role": "assistant", "content": [], "tool_calls": [CALL]}, "assistant:<f a=1>|"),
    "parts": ({"role": "tool", "content": [{"type": "text", "text": "18"}, "degrees"]}, "tool:18\ndegrees|"),
    "empty tool_calls": ({"role": "assistant", "content": "ok", "tool_calls": []}, "assistant:ok|"),
    "null tool_calls": ({"role": "assistant", "content": "ok", "tool_calls": None}, "assistant:ok|"),
    "empty arguments": (
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]}, "assistant:<f>|",
    ),
    "null arguments": (
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": None}}]}, "assistant:<f>|",
    ),
    "arguments as object": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"b": 2}}}]}, "assistant:<f b=2>|",
    ),
    "extra names": ({"role": "user", "content": "x", "name": "sam", "refusal": None}, "user:x|"),
    "other texts": ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "user:x|"),
}  # fmt: skip


@pytest.mark.parametrize(("message", "expected"), SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_of_history(message, expected):
    assert render_chat_text(TOKENIZER, [USER, message], chat_template=SHOW_CALLS) == f"user:Hi|{expected}"


def test_templates_that_read_parts_get_parts():
    messages = [
        USER,
        {"role": "assistant", "content": None},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
    ]
    assert render_chat_text(TOKENIZER, messages, chat_template=PARTS) == "[text Hi]||[text a][text b]|"


def test_messages_of_the_caller_are_left_alone():
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"}
    (normal,) = normalize_messages([message], "string")
    assert normal["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert normal["reasoning"] == normal["reasoning_content"] == "hm"
    assert message == {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"}


@pytest.mark.parametrize(
    "messages",
    [[], {}, "Hi", None, [None], [{}], [{"role": ""}], [{"role": 3}], [{"role": "user", "content": 3}],
     [{"role": "user", "content": {"text": "x"}}], [{"role": "user", "content": [{"text": "x"}]}],
     [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [3]}],
     [{"role": "assistant", "tool_calls": [{}]}], [{"role": "assistant", "tool_calls": "x"}],
     [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}],
     [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]],
    ids=str,
)  # fmt: skip
def test_bad_messages_are_refused(messages):
    assert refuse(messages).param == "messages"


def test_images_are_refused_by_name():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert "'image_url'" in refuse([{"role": "user", "content": [image]}]).message


def test_options_reach_the_template():
    template = "{{ mood }} {% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "look"}}]
    text = render_chat_text(
        TOKENIZER, [USER], chat_template=template, tools=tools, chat_template_kwargs={"mood": "glad"}
    )
    assert text == "glad look"


def test_going_on_with_the_last_message():
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_chat_text(TOKENIZER, messages, **options).endswith("<|im_start|>assistant\nThe answer is ")
    assert refuse(messages, continue_final_message=True).param == "continue_final_message"
    assert render_chat_text(TOKENIZER, messages, chat_template=PARTS, **options).endswith("[text The answer is ")


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "add_generation_prompt", "tokenize"])
def test_reserved_template_arguments_are_refused(name):
    error = refuse([USER], chat_template_kwargs={name: "x"})
    assert (error.param, name in error.message) == ("chat_template_kwargs", True)


def test_errors_of_the_template_are_the_requests():
    assert "no roles" in refuse([USER], chat_template="{{ raise_exception('no roles') }}").message
    assert refuse([USER], chat_template="{% for").param == "chat_template"


def test_a_model_without_a_template_says_so():
    with pytest.raises(RequestError, match="no chat template"):
        render_chat_text(word_piece_tokenizer(), [USER])
