"""The socket on which clients find the server, taken before anything is loaded."""

import ipaddress
import logging
import os
import socket
import stat
import time
from typing import Any

from paxserve.errors import ConfigError
from paxserve.server_config import ServerConfig

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens on the server's address, so that nobody else can."""
    if config.uds is not None:
        return listen_on_path(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {config.host!r} is no address to listen on: {error}.") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bind(listener, address, f"{config.host}:{config.port}", "Choose another --port.")
    return listener


def listen_on_path(path: str) -> socket.socket:
    """The same for a Unix socket; one that a server left behind makes room."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
    bind(listener, path, path, "Choose another --uds.")
    os.chmod(path, 0o600)
    return listener


def bind(listener: socket.socket, address: Any, shown: str, advice: str) -> None:
    """Bind and listen. Raises `ConfigError`, and closes the socket, when that cannot be."""
    try:
        listener.bind(address)
        # Two sockets may be bound to one port as long as neither listens.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {shown}: {error.strerror}. {advice}") from None


def warn_if_open(config: ServerConfig) -> None:
    """Say so when anybody on the network could use the server."""
    if config.uds is not None:
        return
    try:
        is_local = ipaddress.ip_address(config.host or "").is_loopback
    except ValueError:
        is_local = config.host == "localhost"
    if not is_local and not config.api_key:
        logger.warning("Listening on %s without an API key: whoever reaches it can use it (--api-key)", config.host)


def log_serving(model_names: list[str], address: str, started: float) -> None:
    """Say where the server is; `started` is what `time.monotonic()` was."""
    names, seconds = ", ".join(model_names), time.monotonic() - started
    logger.info("Serving %s on %s (%.1f s after the start)", names, address, seconds)


def shown_address(listener: socket.socket, config: ServerConfig) -> str:
    """Where clients find the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
