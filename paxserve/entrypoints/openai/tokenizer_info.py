"""GET /tokenizer_info: what the tokenizer is made of, if the server is told to show it."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from paxserve.entrypoints.context import context_of

router = APIRouter()


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """The special tokens, the size of the vocabulary and the chat template."""
    context = context_of(request)
    if not context.server_config.enable_tokenizer_info_endpoint:
        raise HTTPException(404, "Not Found (the server shows it with --enable-tokenizer-info-endpoint)")
    tokenizer = context.tokenizer
    return {
        **tokenizer.special_tokens,
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "all_special_ids": tokenizer.all_special_ids,
        "model_max_length": context.model_info.max_model_len,
        "chat_template": context.chat_template or tokenizer.chat_template,
    }
