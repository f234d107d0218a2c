"""What every endpoint needs to answer: the engine, the model's names, and the server's settings."""

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from paxserve import __version__
from paxserve.config import EngineConfig
from paxserve.engine.async_engine import AsyncEngine
from paxserve.engine.pooling_inputs import PoolingInputs
from paxserve.engine.switch import EngineSwitch
from paxserve.entrypoints.fronts.all_fronts import FrontGoneError, Fronts, OneFront, quiet
from paxserve.entrypoints.fronts.desk import Desk, Order
from paxserve.entrypoints.protocol.generation import MAX_REQUEST_ID, is_plain_text
from paxserve.entrypoints.response_store import MAX_CHARACTERS, ResponseStore, not_found, owner_of
from paxserve.entrypoints.template_renderer import TemplateRenderer
from paxserve.errors import RequestError
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.messages import ModelInfo
from paxserve.server_config import ServerConfig


@dataclass(kw_only=True)
class ServingContext:
    """One served model."""

    engine: AsyncEngine
    engine_config: EngineConfig
    server_config: ServerConfig
    model_info: ModelInfo
    chat_template: str | None = None
    """The template that replaces the tokenizer's."""
    created: int = field(default_factory=lambda: int(time.time()))
    front: int = 0
    """The number of this front process; 0 for the only one."""

    def __post_init__(self) -> None:
        self.pooling = PoolingInputs(self.engine.input_processor.tokenizer, self.model_info)
        self.model_names = self.server_config.served_model_name or [self.engine_config.model.model]
        digest = hashlib.sha256(repr(self.engine_config).encode()).hexdigest()[:8]
        self.system_fingerprint: str | None = {
            "full": f"paxserve-{__version__}-{digest}",
            "hash": digest,
            "custom": self.server_config.fingerprint_value,
            "none": None,
        }[self.server_config.fingerprint_mode]
        self.digest = digest
        # Each of several fronts keeps its share.
        num_fronts = self.server_config.api_server_count
        self.responses = ResponseStore(
            max(1, self.server_config.max_stored_responses // num_fronts),
            MAX_CHARACTERS // num_fronts,
            front=self.front,
        )
        self.desk = Desk(self.engine, self.responses)
        self.fronts: Fronts = OneFront(self.engine, self.desk)
        self.board = self.engine.admission.board
        self.switch = EngineSwitch(self.engine, lambda is_end: quiet(self.fronts, is_end))
        self._renderer: TemplateRenderer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `RequestError` on a server that has none."""
        tokenizer = self.engine.input_processor.tokenizer
        if tokenizer is None:
            raise RequestError("This server has no tokenizer (skip_tokenizer_init): it takes token ids only.")
        return tokenizer

    @property
    def renderer(self) -> TemplateRenderer:
        """What renders chat templates in processes of their own."""
        if self._renderer is None:
            config = self.server_config
            self._renderer = TemplateRenderer(
                self.tokenizer, seconds=config.chat_template_timeout, max_characters=config.max_prompt_characters
            )
        return self._renderer

    def close(self) -> None:
        """End the processes that were started for answers."""
        if self._renderer is not None:
            self._renderer.close()

    @property
    def default_values(self) -> dict[str, Any]:
        """The sampling values that the model's generation config sets."""
        return self.engine.input_processor.default_values

    async def ask_owner(self, response_id: str, order: Order) -> Any:
        """The answer of the front that keeps a response. Raises `RequestError` (404) when it has ended."""
        try:
            return await self.fronts.ask(owner_of(response_id), order)
        except FrontGoneError:
            raise not_found(response_id) from None

    def model_name(self, asked: str | None) -> str:
        """The name to answer under. Raises `RequestError` (404) for a model that is not served."""
        if not asked:
            return self.model_names[0]
        if asked not in self.model_names:
            aliases = ", ".join(self.model_names)
            raise RequestError(f"The model `{asked[:200]}` does not exist. Valid aliases: {aliases}.", "model", 404)
        return asked


def context_of(request: Request) -> ServingContext:
    """The context of the app that handles `request`."""
    return request.app.state.context


def public_id(prefix: str, request: Request, asked: str | None) -> str:
    """The id of an answer: the client's own (header, then body) when it is harmless, else a random one."""
    header = request.headers.get("x-request-id")
    if header is not None and is_plain_text(header, MAX_REQUEST_ID):
        return f"{prefix}-{header}"
    return f"{prefix}-{asked or uuid.uuid4().hex}"


def json_response(body: msgspec.Struct) -> Response:
    """A successful answer with a JSON body."""
    return Response(msgspec.json.encode(body), media_type="application/json")
