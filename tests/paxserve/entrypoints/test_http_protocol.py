import asyncio
from collections.abc import Awaitable, Callable

import uvicorn

from paxserve.entrypoints.http_protocol import BoundedHttpProtocol
from paxserve.entrypoints.server import HttpServer

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Quick(BoundedHttpProtocol):
    max_header_bytes = 10_000
    header_seconds = 0.3


async def app(scope, receive, send):
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = str(size).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]}
    )
    await send({"type": "http.response.body", "body": body})


def run(test: Callable[[Streams], Awaitable[bytes]]) -> bytes:
    """What `test` returns, given a connection to a server with small limits."""

    async def main() -> bytes:
        server = HttpServer(uvicorn.Config(app, port=0, http=Quick, ws="none", lifespan="off", log_level="error"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return await asyncio.wait_for(test((reader, writer)), 5)
        finally:
            writer.close()
            server.should_exit = True
            await serving

    return asyncio.run(main())


def test_several_requests_with_large_bodies_pass():
    async def test(streams: Streams) -> bytes:
        reader, writer = streams
        answers = b""
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n" + b"x" * 50)
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.write(b"x" * 49950)
            answers += await reader.readuntil(b"50000")
        await asyncio.sleep(0.4)  # idle between requests: the deadline is for headers that have begun
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return answers + await reader.readuntil(b"\r\n\r\n0")

    assert run(test).count(b"HTTP/1.1 200 OK") == 4


def test_headers_without_end_are_cut_off():
    async def test(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 9900)
        await asyncio.sleep(0.1)
        writer.write(b"x" * 100)
        return await reader.read()

    assert run(test).startswith(b"HTTP/1.1 400 Bad Request")


def test_headers_that_trickle_are_cut_off():
    async def test(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(b"GET / HTTP/1.1\r\n")
        return await reader.read()

    assert run(test) == b""


def test_a_connection_that_says_nothing_is_closed():
    async def test(streams: Streams) -> bytes:
        return await streams[0].read()

    assert run(test) == b""
