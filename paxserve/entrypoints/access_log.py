"""One line in the log for each request, its id in the answer's headers, and what is counted of it."""

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paxserve.engine.board import Board, Count
from paxserve.entrypoints.http_metrics import HttpMetrics
from paxserve.entrypoints.protocol.generation import MAX_REQUEST_ID, is_plain_text
from paxserve.server_config import ServerConfig

logger = logging.getLogger(__name__)

MAX_SHOWN_PATH = 200


class AccessLog:
    """ASGI middleware around all others: it also sees the requests that they refuse."""

    def __init__(self, app: ASGIApp, config: ServerConfig, board: Board, metrics: HttpMetrics) -> None:
        self.app, self.board, self.metrics = app, board, metrics
        self.is_on = not config.disable_uvicorn_access_log
        self.silent = frozenset(config.disable_access_log_for_endpoints)
        self.sends_id = config.enable_request_id_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log how it was answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if is_plain_text(asked, MAX_REQUEST_ID) else uuid.uuid4().hex
        started, status, sent = time.perf_counter(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            sent += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.sends_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        is_work = scope["method"] == "POST"
        self.board.add(Count.LOAD, is_work)
        try:
            await self.app(scope, receive, watched)
        finally:
            self.board.add(Count.LOAD, -is_work)
            seconds = time.perf_counter() - started
            handler = getattr(scope.get("route"), "path", "none")
            received = scope.get("state", {}).get("body_bytes", 0)
            self.metrics.record(handler, scope["method"], status, seconds, received, sent)
            if self.is_on and scope["path"] not in self.silent:
                self.log(scope, status, seconds, request_id)

    def log(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        """Write the line; what a client sent is quoted, so that it cannot write lines of its own."""
        client = (scope.get("client") or ("-",))[0]
        path = ascii(scope["path"][:MAX_SHOWN_PATH])[1:-1]
        fields = {
            "client": client, "method": scope["method"][:16], "path": path, "status": status,
            "seconds": round(seconds, 6), "request_id": request_id,
        }  # fmt: skip
        logger.info("%s %s %s %d %.3f s %s", client, fields["method"], path, status, seconds, request_id, extra={
            "fields": fields
        })  # fmt: skip
