"""POST /invocations: SageMaker's one path for every kind of request, told apart by its fields."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from paxserve.entrypoints.context import context_of
from paxserve.entrypoints.openai.chat_completions import create_chat_completion
from paxserve.entrypoints.openai.completions import create_completion
from paxserve.entrypoints.pooling.classify import create_classes
from paxserve.entrypoints.pooling.embeddings import create_embeddings
from paxserve.entrypoints.pooling.rerank import rerank
from paxserve.entrypoints.pooling.score import create_scores
from paxserve.entrypoints.protocol.chat import ChatRequest
from paxserve.entrypoints.protocol.completions import CompletionRequest
from paxserve.entrypoints.protocol.pooling import (
    SCORE_NAMES,
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from paxserve.errors import RequestError

router = APIRouter()

Kind = tuple[type, Callable[[Any, Request], Awaitable[Response]]]

GENERATING: dict[str, Kind] = {
    "messages": (ChatRequest, create_chat_completion),
    "prompt": (CompletionRequest, create_completion),
}
"""The field that tells a kind of request, its body, and what answers it."""

COMPARING: dict[str, Kind] = {
    "query": (RerankRequest, rerank),
    **{first: (ScoreRequest, create_scores) for first, _ in SCORE_NAMES},
}
EMBEDDING: dict[str, Kind] = {"input": (EmbeddingRequest, create_embeddings), **COMPARING}
CLASSIFYING: dict[str, Kind] = {"input": (ClassifyRequest, create_classes), **COMPARING}


@router.post("/invocations")
async def invoke(request: Request, body: Annotated[dict[str, Any], Body()]) -> Response:
    """Answer a chat or a completion; of a model that pools, its vectors, classes or scores."""
    info = context_of(request).pooling.info
    kinds = GENERATING if info is None else EMBEDDING if info.task == "embed" else CLASSIFYING
    for field, (kind, handler) in kinds.items():
        if field in body:
            try:
                parsed = kind(**body)
            except ValidationError as error:
                raise RequestValidationError([
                    {**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()
                ]) from None  # fmt: skip
            return await handler(parsed, request)
    raise RequestError(f"The body must have one of the fields {', '.join(kinds)}.", "body")
