"""POST /rerank, /v1/rerank, /v2/rerank: documents in the order of how well they go with a query (Jina's, Cohere's)."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of, json_response, public_id
from paxserve.entrypoints.pooled import score_pairs
from paxserve.entrypoints.protocol.pooling import (
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    as_texts,
)

router = APIRouter()


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """The documents with their scores, the best first; all of them, or the `top_n` best."""
    context = context_of(request)
    context.pooling.need_scores()
    model = context.model_name(body.model)
    body.check(context.server_config)
    documents = as_texts(body.documents, "documents")
    scores, prompt_tokens = await score_pairs(request, context, body, [body.query], documents)
    results = [
        RerankResult(index, score, RerankDocument(documents[index]) if body.return_documents else None)
        for index, score in enumerate(scores)
    ]
    results.sort(key=lambda result: result.relevance_score, reverse=True)
    answer = RerankResponse(
        id=public_id("score", request, body.request_id),
        model=model,
        usage=RerankUsage(prompt_tokens, prompt_tokens),
        results=results[: body.top_n or len(results)],
    )
    return json_response(answer)
