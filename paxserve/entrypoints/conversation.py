"""Conversations to token ids, for the chat endpoint and for /tokenize."""

from typing import Any

from paxserve.chat import render_chat
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.protocol.chat import ChatTemplateFields


async def prompt_ids(context: ServingContext, body: ChatTemplateFields, **kwargs: Any) -> list[int]:
    """The prompt of a conversation; `kwargs` are defaults for the template's own arguments.

    Raises `RequestError` for what the template refuses.
    """
    tokenizer, messages = context.tokenizer, body.template_messages()
    kwargs |= body.chat_template_kwargs or {}
    if body.documents is not None:
        kwargs["documents"] = body.documents

    def render() -> list[int]:
        return render_chat(
            tokenizer,
            messages,
            chat_template=context.chat_template,
            add_generation_prompt=body.opens_answer,
            continue_final_message=body.continue_final_message,
            tools=body.template_tools(),
            chat_template_kwargs=kwargs,
            add_special_tokens=body.add_special_tokens,
        )

    size = sum(len(str(message.content)) for message in body.messages)
    return await context.engine.in_worker(render, size)
