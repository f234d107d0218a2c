"""What a streamed token costs the front process: from the core's message to the bytes of a server-sent event."""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

from paxserve.config import EngineConfig, ModelConfig
from paxserve.engine import wire
from paxserve.engine.async_engine import AsyncEngine
from paxserve.engine.input_processor import InputProcessor
from paxserve.engine.output_processor import OutputKind, OutputProcessor
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.generation import events, with_end
from paxserve.entrypoints.openai.chat_completions import ChatWriter
from paxserve.entrypoints.protocol.chat import ChatRequest
from paxserve.entrypoints.sse import EventStream
from paxserve.errors import EngineDeadError
from paxserve.loaders.checkpoint import open_tokenizer
from paxserve.messages import DecodedTokens, EngineOutput, EngineRequest, EngineStats, ModelInfo, StepOutputs
from paxserve.metrics import Metrics
from paxserve.server_config import ServerConfig

TEXT = "The quick brown fox jumps over the lazy dog; déjà vu in Zürich costs 5 €, 100 % of it. "


class ScriptedClient:
    """Stands for the core's process: its messages are there from the beginning, encoded."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def add_request(self, request: EngineRequest) -> None:
        """The script knows it already."""

    def abort_requests(self, keys: list[tuple[str, int | None]]) -> None:
        """Nothing runs."""

    async def call(self, method: str) -> Any:
        """No call is made."""
        raise NotImplementedError(method)

    def resolve_call(self, reply: wire.Reply) -> None:
        """No call is made."""

    def fail_calls(self, error: EngineDeadError) -> None:
        """No call is made."""

    async def receive(self) -> wire.FromCore:
        """The next message; none when all have been given out."""
        if not self.messages:
            await asyncio.Event().wait()
        return wire.decode_from_core(self.messages.pop())

    async def wait_exit(self) -> int:
        """It does not end."""
        await asyncio.Event().wait()
        return 0


def measure_front_cost(
    model: str, num_streams: int, num_tokens: int, interval: int, ready: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Tokens a second of this process's CPU time, with `num_streams` chats of `num_tokens` tokens at once.

    `ready` is called when all is prepared, and may wait.
    """
    return asyncio.run(_measure(model, num_streams, num_tokens, interval, ready))


def measure_fronts(model: str, num_streams: int, num_tokens: int, interval: int, num_fronts: int) -> dict[str, float]:
    """The same with the chats shared out to several processes that work at once, and tokens a second of the clock."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(num_fronts)
    orders = [(model, len(range(place, num_streams, num_fronts)), num_tokens, interval) for place in range(num_fronts)]
    pipes, processes = [], []
    for order in orders:
        ours, theirs = context.Pipe(duplex=False)
        pipes.append(ours)
        processes.append(context.Process(target=_measure_together, args=(start, theirs, *order)))
        processes[-1].start()
    results: list[dict[str, float]] = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    total: dict[str, float] = {name: sum(result[name] for result in results) for name in results[0]}
    total["seconds"] = max(result["seconds"] for result in results)
    return {
        "fronts": num_fronts, **total, "tokens_per_cpu_second": total["tokens"] / total["cpu_seconds"],
        "microseconds_per_token": 1e6 * total["cpu_seconds"] / total["tokens"],
        "tokens_per_second": total["tokens"] / total["seconds"],
    }  # fmt: skip


def _measure_together(start: Barrier, results: Connection, *order: Any) -> None:
    results.send(measure_front_cost(*order, ready=start.wait))


async def _measure(
    model: str, num_streams: int, num_tokens: int, interval: int, ready: Callable[[], object]
) -> dict[str, float]:
    context, client = _serving(model, num_tokens)
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "stream": True})
    body.max_tokens = num_tokens
    params = body.sampling_params({})
    engine = context.engine
    requests = [(await engine.prepare_all(f"chatcmpl-{n}", ["Hi"], params))[0] for n in range(num_streams)]
    client.messages = _script(context, requests, num_tokens)
    sent = [0, 0]

    async def send(message: Any) -> None:
        sent[0] += message["type"] == "http.response.body"
        sent[1] += len(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def answer(request: EngineRequest) -> None:
        stream = engine.submit([request], OutputKind.DELTA, interval=interval)
        writer = ChatWriter(context, body, [request], body.messages[-1], request.request_id, "bench")
        response = EventStream(with_end(events(stream, writer), writer), on_close=stream.close)
        await response({"type": "http"}, receive, send)

    answers = [asyncio.ensure_future(answer(request)) for request in requests]
    await asyncio.sleep(0)
    ready()
    begin, began = time.process_time(), time.perf_counter()
    engine.start()
    await asyncio.gather(*answers)
    seconds, elapsed = time.process_time() - begin, time.perf_counter() - began
    await engine.stop()
    count = num_streams * num_tokens
    return {
        "streams": num_streams, "tokens": count, "chunks": sent[0], "bytes": sent[1], "cpu_seconds": seconds,
        "seconds": elapsed, "tokens_per_cpu_second": count / seconds, "microseconds_per_token": 1e6 * seconds / count,
    }  # fmt: skip


def _serving(model: str, num_tokens: int) -> tuple[ServingContext, ScriptedClient]:
    config = EngineConfig(model=ModelConfig(model=model))
    tokenizer = open_tokenizer(config.model)
    info = ModelInfo(
        max_model_len=num_tokens + 64, max_sequence_tokens=num_tokens + 64, vocab_size=tokenizer.vocab_size,
        num_pages=1, page_size=16, max_num_seqs=1, max_num_batched_tokens=1, eos_token_ids=[], generation_config={},
        dtype="float32", num_programs=0, startup_seconds={},
    )  # fmt: skip
    client = ScriptedClient()
    inputs = InputProcessor.for_model(config.model, tokenizer, info)
    engine = AsyncEngine(client, inputs, OutputProcessor(tokenizer), Metrics("bench", config, info))
    return ServingContext(engine=engine, engine_config=config, server_config=ServerConfig(), model_info=info), client


def _script(context: ServingContext, requests: list[EngineRequest], num_tokens: int) -> list[bytes]:
    """The core's messages, one a step, last one first."""
    tokens = itertools.cycle(context.tokenizer.encode(TEXT, add_special_tokens=False))
    request_ids = [request.request_id for request in requests]
    messages = []
    for step in range(num_tokens):
        new, reason = [next(tokens)], "length" if step == num_tokens - 1 else None
        outputs = StepOutputs([])
        if 0 < step < num_tokens - 1:
            outputs.add(DecodedTokens(request_ids, [0] * len(requests), [new] * len(requests)))
        else:
            outputs.add(
                [
                    EngineOutput(request_id=name, new_token_ids=new, finish_reason=reason, first_scheduled_time=1.0)
                    for name in request_ids
                ]
            )
        messages.append(wire.encode(wire.Outputs.of(outputs, EngineStats(num_steps=step))))
    return messages[::-1]
