"""The API key: asked for on every path but the few that tell nothing and run nothing."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from paxserve.entrypoints.errors import error_body, error_response

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Paths that need no key. Anything else does, also a path that no route has."""


class ApiKeyGuard:
    """ASGI middleware that answers 401 unless the request bears one of `keys`.

    It looks at the path that the router will look at, never at the Host header or a rebuilt URL, and an unusual
    spelling of an open path (`//health`) is simply not open.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self.is_allowed(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = error_body("A valid API key is needed: send it as 'Authorization: Bearer KEY'.", 401)
        await error_response(body, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def is_allowed(self, scope: Scope) -> bool:
        """Whether the request bears a key; takes equally long for every wrong one."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, token = values[0].partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return scheme.lower() == b"bearer" and any(matches)
