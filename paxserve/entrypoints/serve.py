"""`paxserve serve`: the engine core starts at once, and the HTTP side gets ready while it loads and compiles."""

import importlib
import ipaddress
import logging
import os
import signal
import socket
import stat
import time
from types import FrameType
from typing import Any, NoReturn

from paxserve.config import EngineConfig
from paxserve.engine.core_client import ENGINE_CORE, CoreClient
from paxserve.entrypoints.waiting_room import WaitingRoom
from paxserve.errors import ConfigError
from paxserve.loaders.demo_model import DEMO_MODEL_ALIAS, demo_model_path
from paxserve.log import configure_logging
from paxserve.server_config import ServerConfig

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def run_server(engine_config: EngineConfig, server_config: ServerConfig, *, core: str = ENGINE_CORE) -> int:
    """Serve until told to stop: 0 after a signal, 1 after the engine core died.

    Raises `ConfigError` when the port, the model or the machine does not allow it to start.
    """
    started = time.monotonic()
    configure_logging(form=server_config.log_format)
    # Before anything is loaded: a port that is taken should not be found out a minute later.
    with listen(server_config) as listener:
        waiting_room = WaitingRoom(listener, is_secret=server_config.ssl_certfile is not None)
        warn_if_open(server_config)
        if engine_config.model.model == DEMO_MODEL_ALIAS:
            demo_model_path()  # fetched once, rather than by the core and by this process at the same time
        # Until the event loop listens to signals, SIGTERM must still end both processes in good order.
        signal.signal(signal.SIGTERM, _leave)
        client = CoreClient.launch(engine_config, core, server_config.log_format)
        try:
            # Late on purpose: FastAPI and the tokenizer take a second, in which the core is already at work.
            server = importlib.import_module("paxserve.entrypoints.server")
            return server.run(client, listener, waiting_room, engine_config, server_config, started)
        except BaseException:
            client.kill()
            raise
        finally:
            waiting_room.close()
            client.close()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


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
