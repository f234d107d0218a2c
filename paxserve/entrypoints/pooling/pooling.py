"""POST /pooling: what a pooling model makes of texts, vectors or probabilities, one a text or one a token."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of
from paxserve.entrypoints.pooled import encode_numbers, list_response, num_tokens, pool_inputs
from paxserve.entrypoints.protocol.pooling import PoolingData, PoolingRequest
from paxserve.errors import RequestError

router = APIRouter()


@router.post("/pooling")
async def create_pooling(body: PoolingRequest, request: Request) -> Response:
    """The numbers of each input, by the task that is asked for or else the model's own."""
    context = context_of(request)
    info = context.pooling.info
    if info is None:
        raise RequestError("The model does not support Pooling API", code=404)
    model = context.model_name(body.model)
    body.check(context.server_config)
    params = body.params()
    params.task = body.task or ("embed" if info.task == "embed" else "classify")
    results = await pool_inputs(request, context, body, params)
    data = [PoolingData(index, encode_numbers(r.outputs.data, body)) for index, r in enumerate(results)]
    return list_response(request, "pool", body.request_id, model, data, num_tokens(results))
