"""GET /health: whether the engine lives and takes requests."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Empty: 200 while the engine works, 503 once it has died or the server is told to stop."""
    engine = context_of(request).engine
    is_well = engine.dead_error is None and engine.admission.state != "draining"
    return Response(status_code=200 if is_well else 503)
