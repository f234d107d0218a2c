"""POST /pause and /resume, GET /is_paused, POST /abort_requests: stop answering for a while."""

from typing import Annotated

from fastapi import APIRouter, Body, Request

from paxserve.engine.switch import PauseMode
from paxserve.entrypoints.context import context_of
from paxserve.entrypoints.fronts.all_fronts import end_answers
from paxserve.errors import RequestError

router = APIRouter()


@router.post("/pause")
async def pause(request: Request, mode: PauseMode = "abort", clear_cache: bool = True) -> dict[str, str]:
    """Hold new requests back; those in flight are ended or waited for, then what is cached is forgotten.

    Or they are kept: they stop where they are and go on at /resume, and so what is cached stays as well.
    """
    context = context_of(request)
    if context.switch.is_asleep:
        raise RequestError("The engine is asleep.", code=409)
    await context.switch.pause(mode)
    if clear_cache and mode != "keep":
        await context.engine.call("reset_prefix_cache")
    return {"status": "paused"}


@router.post("/resume")
async def resume(request: Request) -> dict[str, str]:
    """Answer again, also what has come meanwhile."""
    switch = context_of(request).switch
    if switch.is_asleep:
        raise RequestError("The engine is asleep: /wake_up ends that.", code=409)
    await switch.resume()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(request: Request) -> dict[str, bool]:
    """Whether new requests are held back."""
    return {"is_paused": context_of(request).switch.is_paused}


@router.post("/abort_requests")
async def abort_requests(
    request: Request, request_ids: Annotated[list[str] | None, Body(embed=True)] = None
) -> dict[str, int]:
    """End answers by their ids (`cmpl-...`, `chatcmpl-...`), or all of them; how many requests that were."""
    return {"aborted": await end_answers(context_of(request).fronts, request_ids)}
