"""GET /server_info: what the server was told to do, without its secrets."""

import platform
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from paxserve import __version__
from paxserve.entrypoints.context import context_of

router = APIRouter()

SECRETS = ("api_key", "admin_api_key", "hf_token", "ssl_keyfile")


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Version, configuration, model and machine."""
    context = context_of(request)
    config = msgspec.to_builtins({"engine": context.engine_config, "server": context.server_config})
    return {
        "version": __version__,
        "config": hidden(config),
        "model": msgspec.to_builtins(context.model_info),
        "system": {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()},
    }


def hidden(value: Any) -> Any:
    """The configuration with secrets told as "***"."""
    if not isinstance(value, dict):
        return value
    return {key: "***" if key in SECRETS and entry else hidden(entry) for key, entry in value.items()}
