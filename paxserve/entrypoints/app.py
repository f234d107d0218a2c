"""The FastAPI application: every router of `openai/` and `ops/`, the guards in front, the errors' one shape."""

import importlib
import pkgutil
from collections.abc import Iterator

from fastapi import APIRouter, FastAPI

from paxserve import __version__
from paxserve.entrypoints import openai, ops
from paxserve.entrypoints.auth import ApiKeyGuard
from paxserve.entrypoints.body_limit import BodyLimit
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.errors import add_error_handlers


def routers() -> Iterator[APIRouter]:
    """The router of every endpoint module, found by file name."""
    for package in (openai, ops):
        for module in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{module.name}").router


def create_app(context: ServingContext) -> FastAPI:
    """The application that serves `context`."""
    # Without redirects there is one spelling of each path, and so one decision about its key.
    app = FastAPI(title="paxserve", version=__version__, redirect_slashes=False)
    app.state.context = context
    for router in routers():
        app.include_router(router)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=context.server_config.max_request_body_bytes)
    if context.server_config.api_key:
        app.add_middleware(ApiKeyGuard, keys=context.server_config.api_key)
    return app
