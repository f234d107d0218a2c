"""Conversations to prompts: text by the chat template, then token ids."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import Request

from paxserve.chat import encode_chat, render_chat_text
from paxserve.engine.async_engine import INLINE_CHARACTERS
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.protocol.chat import ChatMessage, ChatOptions, TemplateOptions, template_messages
from paxserve.errors import RequestError


class ChatPrompt(NamedTuple):
    """A conversation as the model gets it."""

    text: str
    token_ids: list[int]


async def chat_prompt(
    context: ServingContext, options: TemplateOptions, messages: Sequence[ChatMessage], request: Request
) -> ChatPrompt:
    """The prompt of a conversation. Raises `RequestError` for what the template refuses."""
    text = await prompt_text(context, options, messages, request)
    tokenizer, special = context.tokenizer, options.add_special_tokens
    encode = context.engine.in_worker(lambda: encode_chat(tokenizer, text, add_special_tokens=special), len(text))
    return ChatPrompt(text, await encode)


async def prompt_text(
    context: ServingContext, body: TemplateOptions, messages: Sequence[ChatMessage], request: Request
) -> str:
    """The prompt of a conversation as text."""
    config = context.server_config
    if body.chat_template is not None and not config.trust_request_chat_template:
        raise RequestError(
            "chat_template is refused: templates are taken from the server's configuration only.", "chat_template"
        )
    kwargs = config.default_chat_template_kwargs | effort_kwargs(body) | (body.chat_template_kwargs or {})
    if body.documents is not None:
        kwargs["documents"] = body.documents
    options: dict[str, Any] = {
        "chat_template": body.chat_template or context.chat_template,
        "add_generation_prompt": body.opens_answer,
        "continue_final_message": body.continue_final_message,
        "tools": body.template_tools(),
        "chat_template_kwargs": kwargs,
        "content_format": config.chat_template_content_format,
    }
    # A template that somebody sent, or one that is given much, may run for ever; the server's own can little.
    if body.chat_template is None and request.state.body_bytes <= INLINE_CHARACTERS:
        return render_chat_text(context.tokenizer, template_messages(messages), **options)
    return await context.renderer.render(template_messages(messages), **options)


def effort_kwargs(body: TemplateOptions) -> dict[str, Any]:
    """What the template is told about the effort that the client wants."""
    effort = body.reasoning_effort if isinstance(body, ChatOptions) else None
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
