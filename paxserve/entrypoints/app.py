"""The FastAPI application: every router of its folders, the guards in front, the errors' one shape."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from paxserve import __version__
from paxserve.entrypoints import admin, anthropic, openai, ops, pooling
from paxserve.entrypoints.access_log import AccessLog
from paxserve.entrypoints.auth import ApiKeyGuard
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.errors import add_error_handlers
from paxserve.entrypoints.http_metrics import HttpMetrics
from paxserve.entrypoints.request_guard import RequestGuard

PACKAGES = (openai, anthropic, pooling, ops)
"""Where the endpoints are that every server has; `admin` joins them where there is an admin key."""


def routers(*packages: ModuleType) -> Iterator[APIRouter]:
    """The router of every endpoint module of these packages, found by file name."""
    for package in packages:
        for module in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{module.name}").router


def create_app(context: ServingContext) -> FastAPI:
    """The application that serves `context`."""
    # Without redirects there is one spelling of each path, and so one decision about its key.
    config = context.server_config
    schema_url = None if config.disable_fastapi_docs else "/openapi.json"  # without it there are no docs either
    app = FastAPI(title="paxserve", version=__version__, redirect_slashes=False, openapi_url=schema_url)
    app.state.context = context
    for router in routers(*PACKAGES):
        app.include_router(router)
    # Without an admin key there are no such routes; with one, the guard must know them all.
    admin_routers = list(routers(admin)) if config.admin_api_key else []
    for router in admin_routers:
        app.include_router(router)
    admin_paths = [route.path for router in admin_routers for route in router.routes if isinstance(route, APIRoute)]
    add_error_handlers(app)
    # The last one added is asked first: who asks is settled before anything that was sent is read.
    app.add_middleware(RequestGuard, config=config)
    app.add_middleware(ApiKeyGuard, config=config, admin_paths=admin_paths)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    metrics = HttpMetrics(context.engine.metrics.registry)
    app.add_middleware(AccessLog, config=config, board=context.board, metrics=metrics)
    return app
