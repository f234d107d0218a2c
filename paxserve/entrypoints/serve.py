"""`paxserve serve`: the engine core starts at once, and the HTTP side gets ready while it loads and compiles."""

import importlib
import signal
import time
from types import FrameType
from typing import NoReturn

from paxserve.config import EngineConfig
from paxserve.engine.core_client import ENGINE_CORE, CoreClient
from paxserve.entrypoints.listener import listen, warn_if_open
from paxserve.entrypoints.waiting_room import WaitingRoom
from paxserve.loaders.demo_model import DEMO_MODEL_ALIAS, demo_model_path
from paxserve.log import configure_logging
from paxserve.server_config import ServerConfig


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
            module = "only_front" if server_config.api_server_count == 1 else "launcher"
            way = importlib.import_module(f"paxserve.entrypoints.fronts.{module}")
            return way.run(client, listener, waiting_room, engine_config, server_config, started)
        except BaseException:
            client.kill()
            raise
        finally:
            waiting_room.close()
            client.close()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)
