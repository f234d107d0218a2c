"""GET /load: how many requests are being answered, for load balancers."""

from fastapi import APIRouter, Request

from paxserve.engine.board import Count
from paxserve.entrypoints.context import context_of

router = APIRouter()


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """The number of POST requests under way."""
    return {"server_load": context_of(request).board.total(Count.LOAD)}
