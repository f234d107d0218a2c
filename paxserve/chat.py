"""Chat messages to the prompt that a model was trained on: content made uniform, then the chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paxserve.chat_content import ContentFormat, detect_content_format
from paxserve.errors import RequestError
from paxserve.loaders.chat_template import TOOL_TEMPLATE, ChatTemplates
from paxserve.loaders.tokenizer import Tokenizer

Message = Mapping[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Kinds of content parts that are text, and the key that holds it."""

RESERVED_KWARGS = {
    "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
}  # fmt: skip
"""What a template is given by other arguments, never by chat_template_kwargs."""


def render_chat_text(
    tokenizer: ChatTemplates,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    content_format: ContentFormat | Literal["auto"] = "auto",
) -> str:
    """The prompt as text, special tokens spelt out. Raises `RequestError` for messages that cannot be rendered."""
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other: a prompt either opens a new "
            "message or goes on with the last one.",
            "continue_final_message",
        )
    kwargs = dict(chat_template_kwargs or {})
    if reserved := RESERVED_KWARGS & kwargs.keys():
        raise RequestError(f"chat_template_kwargs must not contain {min(reserved)!r}.", "chat_template_kwargs")
    named = tokenizer.chat_templates.get(TOOL_TEMPLATE) if tools else None
    template = chat_template or named or tokenizer.chat_template
    if not template:
        raise RequestError("This model has no chat template: give one as chat_template.", "chat_template")
    form: ContentFormat = detect_content_format(template) if content_format == "auto" else content_format
    return tokenizer.apply_chat_template(
        normalize_messages(messages, form),
        tools=[dict(tool) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=template,
        **kwargs,
    )


def encode_chat(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The ids of a rendered prompt; a BOS that the template has written is not put in front again."""
    token_ids = list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    bos = tokenizer.bos_token_id
    if add_special_tokens and bos is not None and token_ids[:2] == [bos, bos]:
        del token_ids[0]
    return token_ids


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, add_special_tokens: bool = False, **options: Any
) -> list[int]:
    """The prompt as token ids; `options` are those of `render_chat_text`."""
    text = render_chat_text(tokenizer, messages, **options)
    return encode_chat(tokenizer, text, add_special_tokens=add_special_tokens)


def normalize_messages(messages: Sequence[Message], content_format: ContentFormat) -> list[dict[str, Any]]:
    """Messages as templates expect them: content in one form, tool arguments as objects, nulls left out."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages.", "messages")
    if not messages:
        raise RequestError("messages must not be empty.", "messages")
    return [_normalize(message, content_format) for message in messages]


def _normalize(message: Message, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError("Each message must be an object with a role.", "messages")
    result = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    texts = _content_texts(message.get("content"))
    if content_format == "string":
        result["content"] = "\n".join(texts)
    else:
        result["content"] = [{"type": "text", "text": text} for text in texts]
    # Templates know the model's thoughts under either name.
    reasoning = result.get("reasoning") or result.get("reasoning_content")
    if reasoning:
        result["reasoning"] = result["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError("tool_calls must be a list of calls.", "messages")
        result["tool_calls"] = [_normalize_call(call) for call in calls]
    return result


def _content_texts(content: Any) -> list[str]:
    """The texts of a message's content, whichever of its forms it has."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise RequestError("The content of a message must be a text, a list of parts, or null.", "messages")
    return [_part_text(part) for part in content]


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        given = repr(kind) if kind else "without a type"
        raise RequestError(f"Content parts must be of type 'text', got one {given}: this model reads text.", "messages")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"A content part of type {kind!r} needs a string {TEXT_PARTS[kind]!r}.", "messages")
    return text


def _normalize_call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object; on the wire they are a string of JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("Each of tool_calls must have a function with a name.", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"The arguments of tool call {function['name']!r} must be a JSON object.", "messages")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
