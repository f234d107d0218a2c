"""GET /version: which paxserve this is."""

from fastapi import APIRouter

from paxserve import __version__

router = APIRouter()


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of paxserve."""
    return {"version": __version__}
