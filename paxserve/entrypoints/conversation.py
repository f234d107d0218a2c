"""Conversations to token ids, for the chat endpoints and for /tokenize."""

from typing import Any

from fastapi import Request

from paxserve.chat import encode_chat, render_chat_text
from paxserve.engine.async_engine import INLINE_CHARACTERS
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.protocol.chat import ChatTemplateFields
from paxserve.errors import RequestError


async def prompt_text(context: ServingContext, body: ChatTemplateFields, request: Request, **kwargs: Any) -> str:
    """The prompt of a conversation as text; `kwargs` are defaults for the template's own arguments.

    Raises `RequestError` for what the template refuses.
    """
    config = context.server_config
    if body.chat_template is not None and not config.trust_request_chat_template:
        raise RequestError(
            "chat_template is refused: templates are taken from the server's configuration only.", "chat_template"
        )
    kwargs = config.default_chat_template_kwargs | kwargs | (body.chat_template_kwargs or {})
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
        return render_chat_text(context.tokenizer, body.template_messages(), **options)
    return await context.renderer.render(body.template_messages(), **options)


async def prompt_ids(context: ServingContext, body: ChatTemplateFields, text: str) -> list[int]:
    """The token ids of a conversation's text."""
    tokenizer, special = context.tokenizer, body.add_special_tokens
    return await context.engine.in_worker(lambda: encode_chat(tokenizer, text, add_special_tokens=special), len(text))
