"""POST /classify: the classes of texts."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of
from paxserve.entrypoints.pooled import list_response, num_tokens, pool_inputs
from paxserve.entrypoints.protocol.pooling import ClassifyData, ClassifyRequest
from paxserve.pooling_params import PoolingParams

router = APIRouter()


@router.post("/classify")
async def create_classes(body: ClassifyRequest, request: Request) -> Response:
    """The probability of each class, and the name of the likeliest, for each input."""
    context = context_of(request)
    labels = context.pooling.need("classify").labels
    model = context.model_name(body.model)
    body.check(context.server_config)
    params = PoolingParams(use_activation=body.use_activation, task="classify")
    results = await pool_inputs(request, context, body, params)
    data = []
    for index, result in enumerate(results):
        probs = result.outputs.data
        data.append(ClassifyData(index, labels[int(probs.argmax())], probs.tolist(), len(probs)))
    return list_response(request, "classify", body.request_id, model, data, num_tokens(results))
