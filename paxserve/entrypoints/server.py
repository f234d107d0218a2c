"""The HTTP process: waits for the engine core, serves, and ends in good order whatever happens to either."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from paxserve.config import EngineConfig
from paxserve.engine.admission import Admission
from paxserve.engine.async_engine import AsyncEngine, Client
from paxserve.engine.board import Board
from paxserve.engine.front_routes import FIRST
from paxserve.engine.input_processor import InputProcessor
from paxserve.engine.output_processor import OutputProcessor
from paxserve.entrypoints.app import create_app
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.fronts.station import Station
from paxserve.entrypoints.http_protocol import bounded_protocol
from paxserve.entrypoints.stats_log import log_stats
from paxserve.entrypoints.stop_requests import StopRequests
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import open_tokenizer
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.log import configure_logging
from paxserve.messages import ModelInfo
from paxserve.metrics import Metrics
from paxserve.server_config import ServerConfig
from paxserve.tracing import Tracer

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.02
"""How often a server that is to stop looks whether its requests have ended."""

LAST_ANSWERS_SECONDS = 5
"""How long clients may take to read the end of their answers when the server stops."""

DEATH_NOTICE_SECONDS = 1.0
"""How long a server whose core has died goes on telling so, to clients and health checks, before it ends."""


class HttpServer(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `StopSignals`, which knows them from before the start."""
        yield


def run(serving: Callable[[uvicorn.Config], Coroutine[Any, Any, int]], server_config: ServerConfig) -> int:
    """The exit status of `serving`, which gets uvicorn's configuration, in an event loop of its kind."""
    configure_logging(server_config.log_level, server_config.log_format, ["uvicorn"])
    config = uvicorn.Config(
        _no_app,
        log_config=None,  # its loggers write as ours do
        access_log=False,  # AccessLog knows more of a request
        timeout_graceful_shutdown=LAST_ANSWERS_SECONDS,
        timeout_keep_alive=server_config.timeout_keep_alive,
        root_path=server_config.root_path or "",
        ssl_keyfile=server_config.ssl_keyfile,
        ssl_certfile=server_config.ssl_certfile,
        ssl_ca_certs=server_config.ssl_ca_certs,
        ssl_cert_reqs=server_config.ssl_cert_reqs,
        server_header=False,
        http=bounded_protocol(server_config.h11_max_incomplete_event_size),
        ws="none",
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(serving(config))


async def serve(
    station: Station, engine_config: EngineConfig, server_config: ServerConfig, config: uvicorn.Config
) -> int:
    """Serve at a station until told to stop; the exit status."""
    stop = station.stop_requests()
    if station.front == FIRST:  # else the launcher says so, once
        logger.info("Loading %s", engine_config.model.model)
    loaded = await _load(station, engine_config, server_config, stop)
    if loaded is None:
        stop.ignore()
        station.give_up()
        return 0
    info, tokenizer, chat_template = loaded
    engine = build_engine(station.client, engine_config, server_config, info, tokenizer, station.board, station.front)
    context = ServingContext(
        engine=engine,
        engine_config=engine_config,
        server_config=server_config,
        model_info=info,
        chat_template=chat_template,
        created=station.created,
        front=station.front,
    )
    config.app = create_app(context)
    server = HttpServer(config)
    loop = asyncio.get_running_loop()
    stopper = Stopper(server, engine, server_config.shutdown_timeout)
    stop.on_request = stopper.stop
    engine.on_death = lambda error: _stop_soon(loop, server)
    engine.start()
    stats_log = asyncio.ensure_future(log_stats(engine)) if station.front == FIRST else None
    gc.collect()
    gc.freeze()  # what is loaded by now stays: full collections would walk it all and delay every stream
    await station.open(context)
    await server.serve(sockets=[station.listener])
    stop.ignore()
    if stats_log is not None:
        stats_log.cancel()
    await context.fronts.close()
    await engine.stop()
    context.close()
    return 1 if engine.dead_error is not None else 0


async def _load(
    station: Station, engine_config: EngineConfig, server_config: ServerConfig, stop_requests: StopRequests
) -> tuple[ModelInfo, Tokenizer | None, str | None] | None:
    """What the core and the front know when both are ready; None when told to stop before that."""
    ready = asyncio.ensure_future(station.client.ready())
    front = asyncio.ensure_future(asyncio.to_thread(load_front, engine_config, server_config))
    stop = asyncio.ensure_future(stop_requests.asked.wait())
    try:
        waiting = {ready, front}
        while waiting:
            done, _ = await asyncio.wait({*waiting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                return None
            for task in done:
                task.result()  # the first failure ends the start
            waiting -= done
        return ready.result(), *front.result()
    finally:
        for task in (ready, front, stop):
            task.cancel()
        await asyncio.gather(ready, front, stop, return_exceptions=True)


def load_front(engine_config: EngineConfig, server_config: ServerConfig) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer, and the chat template that replaces its own."""
    chat_template = read_chat_template(server_config.chat_template)
    model = engine_config.model
    return None if model.skip_tokenizer_init else open_tokenizer(model), chat_template


def read_chat_template(value: str | None) -> str | None:
    """A template given as it is (it has braces or line breaks), or the text of the file that is named."""
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template must be a Jinja template or a file with one: {error}.") from None


def build_engine(
    client: Client,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    board: Board | None = None,
    front: int = 0,
) -> AsyncEngine:
    """The engine of a core that is ready."""
    inputs = InputProcessor(
        engine_config.model,
        tokenizer,
        info.generation_config,
        info.eos_token_ids,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_prompt_tokens=info.max_sequence_tokens,
    )
    name = (server_config.served_model_name or [engine_config.model.model])[0]
    board = board or Board()
    metrics = Metrics(name, engine_config, info, board)
    admission = Admission(
        max_requests=server_config.max_num_queued_reqs,
        max_tokens=server_config.max_num_queued_tokens,
        full_code=server_config.queue_full_status,
        on_refusal=metrics.record_refusal,
        board=board,
    )
    endpoint = server_config.otlp_traces_endpoint
    tracer = Tracer(endpoint, name) if endpoint else None
    return AsyncEngine(
        client, inputs, OutputProcessor(tokenizer), metrics, admission=admission, tracer=tracer, front=front
    )


class Stopper:
    """Ends a server in good order: first it is not ready any more, then what runs may finish, then it leaves."""

    def __init__(self, server: uvicorn.Server, engine: AsyncEngine, seconds: float) -> None:
        self._server, self._engine, self._seconds = server, engine, seconds
        self._task: asyncio.Task[None] | None = None

    def stop(self, count: int) -> None:
        """Begin, when told for the first time; be done at once when told again."""
        if count == 1:
            count = self._engine.num_unfinished
            logger.info("Told to stop: %d requests may finish; a second signal ends them", count)
            self._engine.admission.state = "draining"
            self._task = asyncio.ensure_future(self._drain())
        else:
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        """Wait for the requests; connections stay open meanwhile, so that health checks and clients are told."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        while self._engine.num_unfinished and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_SECONDS)
        if ended := self._engine.end():
            logger.info("%d requests did not finish in time and are ended", ended)
        self._server.should_exit = True


def _stop_soon(loop: asyncio.AbstractEventLoop, server: uvicorn.Server) -> None:
    loop.call_later(DEATH_NOTICE_SECONDS, setattr, server, "should_exit", True)


_no_app = FastAPI()
"""Stands in the configuration until the real application can be made."""
