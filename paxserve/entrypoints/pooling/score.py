"""POST /score, /v1/score: how well texts go together."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of
from paxserve.entrypoints.pooled import list_response, score_pairs
from paxserve.entrypoints.protocol.pooling import ScoreData, ScoreRequest

router = APIRouter()


@router.post("/score")
@router.post("/v1/score")
async def create_scores(body: ScoreRequest, request: Request) -> Response:
    """A score for each pair: one text with each of many, or many with as many."""
    context = context_of(request)
    context.pooling.need_scores()
    model = context.model_name(body.model)
    body.check(context.server_config)
    scores, prompt_tokens = await score_pairs(request, context, body, *body.sides())
    data = [ScoreData(index, score) for index, score in enumerate(scores)]
    return list_response(request, "score", body.request_id, model, data, prompt_tokens)
