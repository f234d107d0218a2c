"""`paxserve run-batch`: a file of requests through the server's own routes, without a port."""

import asyncio
import json
import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from tqdm import tqdm

from paxserve.config import EngineConfig
from paxserve.engine.core_client import ENGINE_CORE, CoreClient
from paxserve.entrypoints.app import create_app
from paxserve.entrypoints.context import ServingContext
from paxserve.entrypoints.server import build_engine, load_front
from paxserve.errors import ConfigError
from paxserve.log import configure_logging
from paxserve.server_config import ServerConfig

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 512
"""Requests that are given to the engine at a time; it runs as many of them as it can."""


class BatchLine(msgspec.Struct):
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def run_batch(
    engine: EngineConfig, server: ServerConfig, source: Path, target: Path, *, core: str = ENGINE_CORE
) -> int:
    """Answer every request of `source` that `target` has no answer to: 1 if some of them got none, else 0."""
    configure_logging("WARNING")
    if server.api_server_count > 1:
        raise ConfigError("api_server_count must be 1: a batch is answered by one process.")
    try:
        lines = read_lines(source)
        done = keep_answers(target)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}.") from None
    rest = [line for line in lines if line.custom_id not in done]
    if done:
        sys.stderr.write(f"{len(lines) - len(rest)} of {len(lines)} requests are answered already.\n")
    if not rest:
        return 0
    client = CoreClient.launch(engine, core)
    try:
        return asyncio.run(_run(client, engine, server, rest, target))
    finally:
        client.close()


async def _run(
    client: CoreClient, engine: EngineConfig, server: ServerConfig, lines: Sequence[BatchLine], target: Path
) -> int:
    async with serving(client, engine, server) as app:
        with target.open("ab") as file:
            return await answer_all(app, server, lines, file)


@asynccontextmanager
async def serving(client: CoreClient, engine_config: EngineConfig, server: ServerConfig) -> AsyncIterator[FastAPI]:
    """The application over a core that has been launched."""
    loaded = asyncio.to_thread(load_front, engine_config, server)
    info, (tokenizer, chat_template) = await asyncio.gather(client.ready(), loaded)
    engine = build_engine(client, engine_config, server, info, tokenizer)
    context = ServingContext(
        engine=engine, engine_config=engine_config, server_config=server, model_info=info, chat_template=chat_template
    )
    engine.start()
    try:
        yield create_app(context)
    finally:
        await engine.stop()
        context.close()


async def answer_all(app: FastAPI, server: ServerConfig, lines: Sequence[BatchLine], file: Any) -> int:
    """Ask for all of them, some at a time, and write each answer when it is there."""
    headers = {"Authorization": f"Bearer {server.api_key[0]}"} if server.api_key else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    places, num_failed = asyncio.Semaphore(MAX_AT_ONCE), 0
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", headers=headers, timeout=None) as http:

        async def answer(line: BatchLine) -> dict[str, Any]:
            async with places:
                return await answer_line(http, line)

        with tqdm(total=len(lines), unit="request", file=sys.stderr) as bar:
            for task in asyncio.as_completed([asyncio.ensure_future(answer(line)) for line in lines]):
                answered = await task
                num_failed += not is_answer(answered)
                file.write(json.dumps(answered, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
                file.flush()
                bar.update()
    if num_failed:
        sys.stderr.write(f"{num_failed} requests got no answer; the file says why.\n")
    return 1 if num_failed else 0


async def answer_line(http: httpx.AsyncClient, line: BatchLine) -> dict[str, Any]:
    """The line of output for a line of input."""
    request_id = f"batch_req_{uuid.uuid4().hex}"
    result = {"id": request_id, "custom_id": line.custom_id, "response": None, "error": None}
    if line.method != "POST" or not line.url.startswith("/v1/"):
        return result | {"error": {"message": f"Only POST to paths under /v1/ is offered, got {line.url!r}."}}
    if line.body.get("stream"):
        return result | {"error": {"message": "stream is not offered in batches."}}
    response = await http.post(line.url, json=line.body)
    try:
        body = response.json()
    except ValueError:
        return result | {"error": {"message": f"HTTP {response.status_code}: {response.text[:200]}"}}
    return result | {"response": {"status_code": response.status_code, "request_id": request_id, "body": body}}


def is_answer(line: dict[str, Any]) -> bool:
    """Whether a line of output has what was asked for."""
    response = line.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def read_lines(source: Path) -> list[BatchLine]:
    """The requests. Raises `ConfigError` for a line that is none, before anything is loaded."""
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, text in enumerate(source.read_bytes().splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}, line {number}: {error}.") from None
        if line.custom_id in seen:
            raise ConfigError(f"{source}, line {number}: custom_id {line.custom_id!r} comes twice.")
        seen.add(line.custom_id)
        lines.append(line)
    return lines


def keep_answers(target: Path) -> set[str]:
    """The ids that the output has answers to; what else is in the file (half a line, failures) is removed."""
    if not target.exists():
        return set()
    kept = [text for text in target.read_bytes().splitlines() if is_answer(parsed(text))]
    write_whole(target, kept)
    return {parsed(text)["custom_id"] for text in kept}


def parsed(text: bytes) -> dict[str, Any]:
    """A line as an object; an empty one if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def write_whole(target: Path, lines: Iterable[bytes]) -> None:
    """Replace a file at once, so that an interruption leaves the old one or the new one."""
    beside = target.with_name(target.name + ".new")
    beside.write_bytes(b"".join(line + b"\n" for line in lines))
    os.replace(beside, target)
