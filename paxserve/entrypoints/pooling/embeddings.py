"""POST /v1/embeddings: the vectors of texts, as OpenAI's clients ask for them."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of
from paxserve.entrypoints.pooled import encode_numbers, list_response, num_tokens, pool_inputs
from paxserve.entrypoints.protocol.pooling import EmbeddingData, EmbeddingRequest

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """One vector for each input."""
    context = context_of(request)
    context.pooling.need("embed")
    model = context.model_name(body.model)
    body.check(context.server_config)
    results = await pool_inputs(request, context, body, body.params())
    data = [EmbeddingData(index, encode_numbers(r.outputs.data, body)) for index, r in enumerate(results)]
    return list_response(request, "embd", body.request_id, model, data, num_tokens(results))
