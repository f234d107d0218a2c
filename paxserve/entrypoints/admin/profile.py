"""POST /start_profile and /stop_profile: a trace by jax.profiler, under the cache folder of the server."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import context_of
from paxserve.errors import RequestError

router = APIRouter()


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin; 409 if one runs."""
    if not await context_of(request).engine.call("start_profile"):
        raise RequestError("A profile is being taken already.", code=409)
    return Response()


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End and write it; 409 if none runs."""
    if not await context_of(request).engine.call("stop_profile"):
        raise RequestError("No profile is being taken.", code=409)
    return Response()
