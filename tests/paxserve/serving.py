"""A whole server in this process, over a scripted core: application, engine and HTTP client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from paxserve.config import EngineConfig, ModelConfig
from paxserve.engine.admission import Admission
from paxserve.engine.async_engine import AsyncEngine
from paxserve.engine.board import Board
from paxserve.engine.input_processor import InputProcessor
from paxserve.engine.output_processor import OutputProcessor
from paxserve.entrypoints.app import create_app
from paxserve.entrypoints.context import ServingContext
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.metrics import Metrics
from paxserve.server_config import ServerConfig
from paxserve.tracing import Tracer
from tests.paxserve.fake_core import FakeCore
from tests.paxserve.local_client import LocalClient
from tests.small_tokenizers import byte_level_tokenizer

T = TypeVar("T")


class Serving:
    """What a test looks at."""

    def __init__(self, config: EngineConfig, core: Any, tokenizer: Tokenizer | None, server: dict[str, Any]) -> None:
        self.engine_config, self.core = config, core
        self.client = LocalClient(self.core)
        info = self.core.model_info
        inputs = InputProcessor(
            self.engine_config.model,
            tokenizer,
            info.generation_config,
            info.eos_token_ids,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_prompt_tokens=info.max_sequence_tokens,
        )
        board = Board()
        metrics = Metrics("fake", self.engine_config, info, board)
        config = ServerConfig(**server)
        admission = Admission(
            max_requests=config.max_num_queued_reqs,
            max_tokens=config.max_num_queued_tokens,
            full_code=config.queue_full_status,
            on_refusal=metrics.record_refusal,
            board=board,
        )
        tracer = Tracer(config.otlp_traces_endpoint, "fake") if config.otlp_traces_endpoint else None
        self.engine = AsyncEngine(
            self.client, inputs, OutputProcessor(tokenizer), metrics, admission=admission, tracer=tracer
        )
        self.context = ServingContext(
            engine=self.engine,
            engine_config=self.engine_config,
            server_config=config,
            model_info=info,
        )
        self.app = create_app(self.context)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, prompt: Any = "Hello", **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **body)

    async def chat(self, content: str = "Hello", **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": content}], **body})


@asynccontextmanager
async def serving(model: dict[str, Any] | None = None, **server: Any) -> AsyncIterator[Serving]:
    """A running server; `server` are fields of its `ServerConfig`."""
    config = EngineConfig(model=ModelConfig(model="fake", **(model or {})))
    core = FakeCore(config)
    core.step_seconds = 0
    tokenizer = None if config.model.skip_tokenizer_init else byte_level_tokenizer()
    async with serving_core(config, core, tokenizer, **server) as served:
        yield served


@asynccontextmanager
async def serving_core(
    config: EngineConfig, engine_core: Any, tokenizer: Tokenizer | None, **server: Any
) -> AsyncIterator[Serving]:
    """A running server of a core that is there already, under the name `fake`."""
    served = Serving(config, engine_core, tokenizer, {"served_model_name": ["fake"], **server})
    served.engine.start()
    core = asyncio.ensure_future(served.client.run())
    try:
        yield served
    finally:
        await served.http.aclose()
        await served.engine.stop()
        served.context.close()
        core.cancel()


def run(test: Callable[[Serving], Awaitable[T]], **server: Any) -> T:
    """The result of `test` on a running server."""

    async def main() -> T:
        async with serving(**server) as served:
            return await asyncio.wait_for(test(served), 20)

    return asyncio.run(main())


async def until(condition) -> None:
    """Return as soon as `condition()` holds; a message may still be on its way to the core."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)
