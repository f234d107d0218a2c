"""API keys: asked for on every path but the few that tell nothing and run nothing; admin paths have their own."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette._utils import get_route_path  # the very function by which the router decides
from starlette.types import ASGIApp, Receive, Scope, Send

from paxserve.entrypoints.errors import error_body, error_response
from paxserve.server_config import ServerConfig

ALWAYS_OPEN = frozenset({"/health"})
"""Paths that need no key. Anything else does, also a path that no route has."""

KEY_HEADER_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Paths on which `x-api-key` is as good as a bearer: Anthropic's clients send that."""


class ApiKeyGuard:
    """ASGI middleware that answers 401 unless the request bears the key that its path asks for, 403 to a client's key
    where only the admin's will do.

    It looks at the path that the router will look at, never at the Host header or a rebuilt URL, and an unusual
    spelling of an open path (`//health`) is simply not open.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, admin_paths: Sequence[str] = ()) -> None:
        self.app = app
        self.keys, self.admin_keys = digests(config.api_key), digests(config.admin_api_key)
        self.admin_paths = frozenset(admin_paths)
        is_open = {"/metrics": config.open_metrics, "/version": config.open_version}
        self.open_paths = ALWAYS_OPEN | {path for path, opened in is_open.items() if opened}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan" or self.is_allowed(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if bears(scope, self.keys):
            await error_response(error_body("This path needs an admin key.", 403))(scope, receive, send)
            return
        body = error_body("A valid API key is needed: send it as 'Authorization: Bearer KEY'.", 401)
        await error_response(body, {"WWW-Authenticate": "Bearer"}, path=scope["path"])(scope, receive, send)

    def is_allowed(self, scope: Scope) -> bool:
        """Whether the request may pass; takes equally long for every wrong key."""
        path = get_route_path(scope)
        if path in self.admin_paths:
            return bears(scope, self.admin_keys)
        if not self.keys or path in self.open_paths:
            return True
        return bears(scope, [*self.keys, *self.admin_keys], takes_header=path in KEY_HEADER_PATHS)


def digests(keys: Sequence[str]) -> list[bytes]:
    """What is kept of keys."""
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def bears(scope: Scope, known: Sequence[bytes], *, takes_header: bool = False) -> bool:
    """Whether the request presents exactly one credential, and that one is known."""
    presented = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            presented.append(token.strip() if scheme.lower() == b"bearer" else b"")
        elif takes_header and name == b"x-api-key":
            presented.append(value.strip())
    if not presented or any(token != presented[0] for token in presented) or not presented[0]:
        return False
    digest = hashlib.sha256(presented[0]).digest()
    return any([hmac.compare_digest(digest, key) for key in known])
