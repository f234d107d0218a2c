"""GET /metrics: what Prometheus scrapes."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from paxserve.entrypoints.context import context_of

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics as text."""
    text = await context_of(request).fronts.render_metrics()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
