"""uvicorn's HTTP protocol with a bound on what a connection may send, and how slowly, before it has asked anything."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 256 * 1024
"""Most bytes up to the end of a request's headers, give or take what one read from the socket brings."""

HEADER_SECONDS = 30.0
"""How long a connection may take for a request's headers once it has begun them, or for its first request."""


def bounded_protocol(limit: int) -> type["BoundedHttpProtocol"]:
    """The protocol with a limit on the bytes of headers."""
    return type("LimitedHttpProtocol", (BoundedHttpProtocol,), {"max_header_bytes": limit})


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose headers never end: too long, or too slow."""

    max_header_bytes = MAX_HEADER_BYTES
    header_seconds = HEADER_SECONDS
    _header_bytes = 0
    _in_headers = True
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._begin_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline with the connection."""
        self._end_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless it is more header than anybody needs."""
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                self.send_400_response("The request's headers are too long.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request has begun."""
        super().on_message_begin()
        if not self._in_headers:
            self._begin_headers()

    def on_headers_complete(self) -> None:
        """A request's headers are there."""
        self._end_headers()
        super().on_headers_complete()

    def _begin_headers(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        self._deadline = self.loop.call_later(self.header_seconds, self.transport.close)

    def _end_headers(self) -> None:
        self._in_headers = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
