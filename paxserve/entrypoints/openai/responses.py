"""POST /v1/responses and what belongs to it: OpenAI's newer API for answers."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from paxserve.engine.output_processor import OutputKind
from paxserve.engine.request_stream import RequestStream
from paxserve.entrypoints.context import ServingContext, context_of
from paxserve.entrypoints.conversation import chat_prompt
from paxserve.entrypoints.errors import ErrorBody, body_of
from paxserve.entrypoints.fronts.desk import CancelResponse, FollowResponse, GetConversation, GetResponse
from paxserve.entrypoints.generation import Batch, TokenCount, answer, collect, events
from paxserve.entrypoints.logprobs import LogprobWriter
from paxserve.entrypoints.protocol.chat import template_messages
from paxserve.entrypoints.protocol.responses import ResponsesRequest
from paxserve.entrypoints.response_store import EventLog, StoredResponse
from paxserve.entrypoints.sse import EventStream, named_event
from paxserve.errors import EngineDeadError, RequestError
from paxserve.messages import EngineRequest
from paxserve.outputs import CompletionOutput, RequestOutput

router = APIRouter()

ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "previous_response_id",
    "top_logprobs", "truncation", "background",
)  # fmt: skip
"""Fields of the request that the response repeats."""


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer one input."""
    context = context_of(request)
    model = context.model_name(body.model)
    body.check(context.server_config)
    earlier = []
    if body.previous_response_id is not None:
        earlier = await context.ask_owner(body.previous_response_id, GetConversation(body.previous_response_id))
    params = body.sampling_params(context.default_values)
    chat = body.chat(earlier)
    prompt = await chat_prompt(context, chat, chat.messages, request)
    answer_id = context.responses.new_id()
    requests = await context.engine.prepare_all(answer_id, [prompt.token_ids], params, **body.engine_options())
    # The instructions of one turn are not part of the next.
    said = template_messages(chat.messages)[1 if body.instructions else 0 :]
    writer = ResponseWriter(context, body, requests, answer_id, model, said)
    if body.background:
        return run_in_background(context, writer)
    return await answer(request, context, requests, [None], writer, body)


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """A response that was stored, as far as it has come; or its events, those after one of them, to its end."""
    context = context_of(request)
    if stream:
        start = 0 if starting_after is None else starting_after + 1
        return event_stream(context, await context.ask_owner(response_id, FollowResponse(response_id, start)))
    stored = await context.ask_owner(response_id, GetResponse(response_id))
    if starting_after is not None:
        raise RequestError("starting_after needs stream=true.", "starting_after")
    return JSONResponse(stored)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that runs in the background."""
    return JSONResponse(await context_of(request).ask_owner(response_id, CancelResponse(response_id)))


def run_in_background(context: ServingContext, writer: "ResponseWriter") -> Response:
    """Begin a response and tell its id."""
    stored = StoredResponse(writer.body_with("queued"), writer.messages)
    context.responses.put(stored)
    log = stored.log = EventLog() if writer.body.stream else None
    kind = OutputKind.FINAL_ONLY if log is None else OutputKind.DELTA
    stream = context.engine.submit(writer.requests, kind, interval=writer.body.stream_interval or 1)
    stored.task = asyncio.ensure_future(finish_in_background(stored, stream, writer))
    # Who leaves this stream does not end the response.
    return JSONResponse(stored.body) if log is None else event_stream(context, log.follow(0))


def event_stream(context: ServingContext, log: AsyncGenerator[bytes, None]) -> Response:
    """The events of a response in the background, as they come; an error as the last one if its front ends."""

    async def with_error() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(log):
                async for piece in log:
                    yield piece
        except EngineDeadError as error:
            told = body_of(error).error
            yield named_event("error", {"type": "error", "message": told.message, "code": told.type, "param": None})

    return EventStream(with_error(), on_close=lambda: None, keep_alive=context.server_config.sse_keep_alive_interval)


async def finish_in_background(stored: StoredResponse, stream: RequestStream, writer: "ResponseWriter") -> None:
    """Wait for the answer and put it where it is retrieved from."""
    stored.body, log = writer.body_with("in_progress"), stored.log
    try:
        if log is None:
            outputs = await collect(stream, 1)
            stored.body = writer.take(outputs[0])
        else:
            async with aclosing(events(stream, writer)) as pieces:
                async for piece in pieces:
                    log.add(piece)
            stored.body = writer.final
        stored.messages = writer.conversation()
    except asyncio.CancelledError:
        stored.body = writer.body_with("cancelled")
        if log is not None:
            log.add(writer.end_with(stored.body))
    except Exception as error:
        told = body_of(error)
        failure = {"error": {"code": "server_error", "message": told.error.message}}
        stored.body = writer.body_with("failed") | failure
        if log is not None:
            log.add(writer.end_with(stored.body))
    finally:
        stream.close()
        if log is not None:
            log.close()


class ResponseWriter:
    """Writes a response, whole or in events."""

    end = b""

    def __init__(
        self,
        context: ServingContext,
        body: ResponsesRequest,
        requests: Sequence[EngineRequest],
        answer_id: str,
        model: str,
        messages: list[dict[str, Any]],
    ) -> None:
        self.context, self.body, self.requests, self.messages = context, body, requests, messages
        self.answer_id, self.model, self.created = answer_id, model, int(time.time())
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.count = TokenCount(requests)
        tokenizer = context.engine.input_processor.tokenizer
        self.logprobs = LogprobWriter(tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self.text = ""
        self.written: list[Any] = []
        """The log-probabilities so far."""
        self.finish_reason: str | None = None
        self.number = 0
        self.final: dict[str, Any] = {}
        """The response as it ended, once it has."""

    def open(self) -> bytes:
        """The response, its one item and that one's part are announced."""
        waiting = self.body_with("in_progress")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return b"".join([
            self._event("response.created", response=waiting),
            self._event("response.in_progress", response=waiting),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._part_event("response.content_part.added", part=part),
        ])  # fmt: skip

    def write(self, batch: Batch) -> bytes:
        """The text that has come."""
        events = []
        for position, output in batch:
            self.count.add(position, output)
            for choice in output.outputs:
                new = self._add(choice)
                if choice.text or new:
                    events.append(self._part_event("response.output_text.delta", delta=choice.text, logprobs=new))
        return b"".join(events)

    def finish(self) -> bytes:
        """Text, part, item and response are closed."""
        final = self.final = self._final()
        return b"".join([
            self._part_event("response.output_text.done", text=self.text, logprobs=self.written),
            self._part_event("response.content_part.done", part=self._part()),
            self._event("response.output_item.done", output_index=0, item=final["output"][0]),
            self._event("response.completed", response=final),
        ])  # fmt: skip

    def fail(self, body: ErrorBody) -> bytes:
        """The error as the last event."""
        error = body.error
        return self._event("error", message=error.message, code=error.type, param=error.param)

    def end_with(self, response: dict[str, Any]) -> bytes:
        """The last event of a response in the background that did not come to its end."""
        return self._event("response.failed", response=response)

    def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        """The whole answer."""
        return JSONResponse(self.take(outputs[0]))

    def take(self, output: RequestOutput) -> dict[str, Any]:
        """The response with the whole of its answer."""
        self.count.add(0, output)
        self._add(output.outputs[0])
        return self._final()

    def conversation(self) -> list[dict[str, Any]]:
        """What was said, with this answer."""
        return [*self.messages, {"role": "assistant", "content": self.text}]

    def body_with(self, status: str) -> dict[str, Any]:
        """The response in a state before its end."""
        params, body = self.requests[0].params, self.body
        echoed = {name: getattr(body, name) for name in ECHOED}
        return {
            "id": self.answer_id, "object": "response", "created_at": self.created, "status": status,
            "model": self.model, "output": [], "error": None, "incomplete_details": None, "usage": None,
            "temperature": params.temperature, "top_p": params.top_p, "tools": [], "tool_choice": "none",
            "prompt": None, "user": None, "service_tier": "auto", "store": body.is_stored(self.context.server_config),
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "reasoning": body.reasoning.model_dump() if body.reasoning else None,
            **echoed, "background": bool(body.background), "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False, "truncation": body.truncation or "disabled",
        }  # fmt: skip

    def _add(self, choice: CompletionOutput) -> list[Any]:
        self.text += choice.text
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.logprobs is None:
            return []
        entries = self.logprobs.chat(choice.token_ids, choice.logprobs, self.body.top_logprobs or 0).content
        new = [
            {"token": e.token, "logprob": e.logprob, "bytes": e.bytes,
             "top_logprobs": [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes} for t in e.top_logprobs]}
            for e in entries
        ]  # fmt: skip
        self.written += new
        return new

    def _final(self) -> dict[str, Any]:
        is_cut = self.finish_reason == "length"
        status = {"length": "incomplete", "abort": "cancelled"}.get(self.finish_reason or "", "completed")
        usage = self.count.usage()
        cached = self.count.cached_tokens
        body = self.body_with(status) | {
            "output": [self._item("incomplete" if is_cut else "completed", [self._part()])],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }  # fmt: skip
        if self.body.is_stored(self.context.server_config) and not self.body.background:
            self.context.responses.put(StoredResponse(body, self.conversation()))
        return body

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.written}

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        return named_event(kind, payload)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self.item_id, output_index=0, content_index=0, **fields)
