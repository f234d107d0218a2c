"""GET /health: whether the engine lives."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Empty: 200 while the engine lives, 503 once it has died."""
    return Response(status_code=200 if context_of(request).engine.dead_error is None else 503)
