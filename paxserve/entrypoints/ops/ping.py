"""GET and POST /ping: the health check that SageMaker asks for."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.ops.health import health

router = APIRouter()


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As /health: empty, 200 or 503."""
    return await health(request)
