"""Chat templates: Jinja in a sandbox, with the filters and globals that Hugging Face templates expect."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paxserve.errors import RequestError

# The space at its end tells, once rendered, whether the template trims messages.
CONTINUE_MARK = "PAXSERVE_CONTINUES_HERE "


DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    extensions = [_GenerationBlock, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False, **context: Any
) -> str:
    """The prompt for `messages`; `RequestError` for whatever the template refuses.

    With `continue_final_message` the prompt stops where the last message's text does.
    """
    if continue_final_message:
        messages = _mark_final_text(messages)
    try:
        text = _compile(template).render(messages=messages, **context)
    except (jinja2.TemplateSyntaxError, jinja2.TemplateAssertionError) as error:
        raise RequestError(f"The chat template is not valid Jinja: {error}", param="chat_template") from error
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
    return _cut_at_mark(text) if continue_final_message else text


class ChatTemplates:
    """The chat templates of a checkpoint by name, and the special tokens that they spell."""

    def __init__(self, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]) -> None:
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template, None if it has none."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a chat, to be encoded with `add_special_tokens=False`: templates write BOS themselves.

        `chat_template` replaces the checkpoint's; `kwargs` are passed to it. `RequestError` when there is no
        template, or the template refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        named = self.chat_templates.get(TOOL_TEMPLATE) if tools else None
        template = chat_template or named or self.chat_template
        if not template:
            raise RequestError("The model has no chat template: give one, or use completions.", param="messages")
        context = {**self.special_tokens, "documents": None, **kwargs}
        context |= {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        return render_chat(template, messages, continue_final_message=continue_final_message, **context)


def _mark_final_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        marked: Any = content + CONTINUE_MARK
    elif isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + CONTINUE_MARK}]
    else:
        raise RequestError(
            "continue_final_message needs a last message with text to continue.", param="continue_final_message"
        )
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _cut_at_mark(rendered: str) -> str:
    position = rendered.rfind(CONTINUE_MARK.strip())
    if position < 0:
        raise RequestError(
            "continue_final_message is set, but the chat template drops the end of the last message.",
            param="continue_final_message",
        )
    is_trimmed = not rendered.startswith(CONTINUE_MARK, position)
    return rendered[:position].rstrip() if is_trimmed else rendered[:position]
