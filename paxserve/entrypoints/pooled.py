"""The life of a pooling request on the server: check, run together, and be aborted when the client leaves."""

import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Request
from starlette.responses import Response

from paxserve.engine.pooled_requests import Pooled
from paxserve.engine.pooling_inputs import as_pairs
from paxserve.engine.pooling_results import cosine_score
from paxserve.entrypoints.context import ServingContext, json_response, public_id
from paxserve.entrypoints.protocol.generation import Usage
from paxserve.entrypoints.protocol.pooling import EncodingFields, InputFields, PoolingResponse, ScoringFields
from paxserve.entrypoints.sse import until_disconnect
from paxserve.errors import RequestError
from paxserve.pooling_params import PoolingParams


async def pool_inputs(
    request: Request, context: ServingContext, body: InputFields, params: PoolingParams
) -> list[Pooled]:
    """The answer to each input of the body."""
    prompts, process = body.prompts, context.pooling.process
    arrival_time = time.time()
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    requests = await context.engine.in_worker(
        lambda: [process("pool", prompt, params, arrival_time=arrival_time, **body.options) for prompt in prompts],
        size,
    )
    return await until_disconnect(request, context.engine.pool(requests))


async def score_pairs(
    request: Request, context: ServingContext, body: ScoringFields, first: Sequence[str], second: Sequence[str]
) -> tuple[list[float], int]:
    """The score of each pair, and the prompt tokens that they took."""
    info = context.pooling.need_scores()
    pairs = as_pairs(first, second)  # before any text is looked at: their numbers must fit
    first, second = await context.engine.in_worker(
        lambda: (
            [context.pooling.cut(text, body.max_tokens_per_query, "max_tokens_per_query") for text in first],
            [context.pooling.cut(text, body.max_tokens_per_doc, "max_tokens_per_doc") for text in second],
        ),
        sum(map(len, (*first, *second))),
    )
    pairs = as_pairs(first, second)
    if info.task == "classify":
        return await _read_together(request, context, body, pairs)
    params = PoolingParams(use_activation=body.use_activation, task="embed")
    if body.task_instruction is not None:
        raise RequestError("instruction is not supported: this model knows no instructions.", "instruction")
    texts, process = [*first, *second], context.pooling.process
    requests = await context.engine.in_worker(
        lambda: [process("score", t, params, truncate_prompt_tokens=body.truncate_prompt_tokens) for t in texts],
        sum(map(len, texts)),
    )
    results = await until_disconnect(request, context.engine.pool(requests))
    queries, documents = results[: len(first)], results[len(first) :]
    queries = queries * len(documents) if len(queries) == 1 else queries
    vectors = [(a.outputs.data, b.outputs.data) for a, b in zip(queries, documents, strict=True)]
    return [cosine_score(*pair) for pair in vectors], num_tokens(results)


async def _read_together(
    request: Request, context: ServingContext, body: ScoringFields, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], int]:
    params, process = PoolingParams(use_activation=body.use_activation, task="classify"), context.pooling.process_pair
    options: dict[str, Any] = {
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "instruction": body.task_instruction,
        "template": context.chat_template,
        "arrival_time": time.time(),
    }
    requests = await context.engine.in_worker(
        lambda: [process("score", *pair, params, **options) for pair in pairs], sum(len(a) + len(b) for a, b in pairs)
    )
    results = await until_disconnect(request, context.engine.pool(requests))
    return [float(result.outputs.data[0]) for result in results], num_tokens(results)


def num_tokens(results: Sequence[Pooled]) -> int:
    """Prompt tokens of all answers."""
    return sum(len(result.prompt_token_ids) for result in results)


def encode_numbers(data: np.ndarray, form: EncodingFields) -> Any:
    """A vector (or matrix) as lists, or as base64 of its numbers one after another."""
    if form.encoding_format == "float":
        return data.tolist()
    kind = np.dtype(form.embed_dtype)
    if form.endianness != "native":
        kind = kind.newbyteorder(form.endianness)
    return base64.b64encode(np.ascontiguousarray(data, kind).tobytes()).decode()


def list_response(
    request: Request, prefix: str, asked_id: str | None, model: str, data: Any, prompt_tokens: int
) -> Response:
    """The answer of an endpoint that returns a list."""
    body = PoolingResponse(
        id=public_id(prefix, request, asked_id),
        created=int(time.time()),
        model=model,
        data=data,
        usage=Usage(prompt_tokens, prompt_tokens, 0),
    )
    return json_response(body)
