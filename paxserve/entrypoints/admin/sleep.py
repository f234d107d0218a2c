"""POST /sleep and /wake_up, GET /is_sleeping: give the device's memory back for a while."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from paxserve.engine.switch import PauseMode
from paxserve.entrypoints.context import context_of
from paxserve.errors import RequestError

router = APIRouter()


@router.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: PauseMode = "abort") -> dict[str, Any]:
    """Free the KV pool and keep the weights on the host (level 1), or only stop answering (level 0).

    Level 2 throws the weights away too: /wake_up reads them from the checkpoint.
    """
    if level not in (0, 1, 2):
        raise RequestError(f"level must be 0, 1 or 2, got {level}.", "level")
    if level > 0 and mode == "keep":
        raise RequestError("mode=keep needs level=0: the memory of requests in flight would be freed.", "mode")
    switch = context_of(request).switch
    if switch.is_asleep:
        raise RequestError("The engine is asleep already.", code=409)
    if level == 0:
        await switch.pause(mode)
    elif not await switch.sleep(mode, level):
        raise RequestError("Requests are still running.", code=409)
    return {"status": "sleeping", "level": level}


@router.post("/wake_up")
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
    """Work again."""
    if tags:
        raise RequestError("tags is not supported: everything wakes up together.", "tags")
    switch = context_of(request).switch
    if switch.is_asleep:
        await switch.wake_up()
    else:
        await switch.resume()
    return {"status": "awake", "tags": None}


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether /sleep was the last that was asked for."""
    switch = context_of(request).switch
    return {"is_sleeping": switch.is_asleep or switch.is_paused}
