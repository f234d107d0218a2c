"""POST /tokenize and /detokenize: text to token ids and back, as the model sees them."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of, json_response
from paxserve.entrypoints.conversation import chat_prompt
from paxserve.entrypoints.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizePromptRequest,
    TokenizeResponse,
)
from paxserve.errors import RequestError

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizePromptRequest | TokenizeChatRequest, request: Request) -> Response:
    """The token ids of a text or a conversation."""
    context = context_of(request)
    context.model_name(body.model)
    body.check(context.server_config)
    tokenizer = context.tokenizer
    if isinstance(body, TokenizePromptRequest):
        text, special = body.prompt, body.add_special_tokens
        token_ids = await context.engine.in_worker(lambda: tokenizer.encode(text, special), len(text))
    else:
        token_ids = (await chat_prompt(context, body, body.messages, request)).token_ids
    strings = [token or "" for token in tokenizer.convert_ids_to_tokens(token_ids)] if body.return_token_strs else None
    return json_response(TokenizeResponse(len(token_ids), context.model_info.max_model_len, list(token_ids), strings))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens spelt out."""
    context = context_of(request)
    context.model_name(body.model)
    body.check(context.server_config)
    limit = context.model_info.vocab_size - 1
    for token_id in body.tokens:
        if not 0 <= token_id <= limit:
            raise RequestError(f"Token id {token_id} is out of vocabulary: ids go from 0 to {limit}.", "tokens")
    tokenizer, token_ids = context.tokenizer, body.tokens
    decode = context.engine.in_worker(lambda: tokenizer.decode(token_ids, skip_special_tokens=False), len(token_ids))
    return json_response(DetokenizeResponse(await decode))
