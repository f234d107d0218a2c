"""POST /reset_prefix_cache: forget what prompts had in common."""

from fastapi import APIRouter, Request

from paxserve.entrypoints.context import context_of
from paxserve.errors import RequestError

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Forget all cached prefixes; not successful while requests run."""
    for name, value in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
        if value:
            raise RequestError(f"{name} is not supported.", name)
    return {"success": await context_of(request).engine.call("reset_prefix_cache")}
