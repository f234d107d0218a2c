"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API for chats."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from paxserve.entrypoints.context import ServingContext, context_of, public_id
from paxserve.entrypoints.conversation import chat_prompt
from paxserve.entrypoints.errors import ErrorBody, anthropic_body
from paxserve.entrypoints.generation import Batch, TokenCount, answer
from paxserve.entrypoints.protocol.messages import CountTokensRequest, MessagesRequest
from paxserve.entrypoints.sse import named_event
from paxserve.messages import EngineRequest
from paxserve.outputs import CompletionOutput, RequestOutput

router = APIRouter()


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    model = context.model_name(body.model)
    body.check(context.server_config)
    chat = body.chat()
    chat.check(context.server_config)
    params = chat.sampling_params(context.default_values)
    answer_id = public_id("msg", request, None)
    prompt = await chat_prompt(context, chat, chat.messages, request)
    requests = await context.engine.prepare_all(answer_id, [prompt.token_ids], params, **chat.engine_options())
    return await answer(request, context, requests, [None], MessageWriter(context, requests, answer_id, model), chat)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    """How many tokens the model would read."""
    context = context_of(request)
    context.model_name(body.model)
    body.check(context.server_config)
    chat = body.chat()
    return {"input_tokens": len((await chat_prompt(context, chat, chat.messages, request)).token_ids)}


class MessageWriter:
    """Writes a message, whole or in events."""

    end = b""

    def __init__(self, context: ServingContext, requests: Sequence[EngineRequest], answer_id: str, model: str) -> None:
        self.answer_id, self.model = answer_id, model
        self.count = TokenCount(requests)
        self.last: CompletionOutput | None = None

    def open(self) -> bytes:
        """The message and its one block are announced."""
        message = self._message([], None)
        block = {"type": "text", "text": ""}
        return self._event("message_start", message=message) + self._event(
            "content_block_start", index=0, content_block=block
        )

    def write(self, batch: Batch) -> bytes:
        """The text that has come."""
        events = []
        for position, output in batch:
            self.count.add(position, output)
            for choice in output.outputs:
                self.last = choice
                if choice.text:
                    delta = {"type": "text_delta", "text": choice.text}
                    events.append(self._event("content_block_delta", index=0, delta=delta))
        return b"".join(events)

    def finish(self) -> bytes:
        """Block and message are closed."""
        delta = stop_fields(self.last)
        usage = {"input_tokens": self.count.prompt_tokens, "output_tokens": self.count.completion_tokens}
        return b"".join([
            self._event("content_block_stop", index=0),
            self._event("message_delta", delta=delta, usage=usage),
            self._event("message_stop"),
        ])  # fmt: skip

    def fail(self, body: ErrorBody) -> bytes:
        """The error as the last event."""
        return named_event("error", anthropic_body(body))

    def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        """The whole answer."""
        self.count.add(0, outputs[0])
        choice = outputs[0].outputs[0]
        return JSONResponse(self._message([{"type": "text", "text": choice.text}], choice))

    def _message(self, content: list[Any], choice: CompletionOutput | None) -> dict[str, Any]:
        return {
            "id": self.answer_id, "type": "message", "role": "assistant", "content": content, "model": self.model,
            **stop_fields(choice),
            "usage": {"input_tokens": self.count.prompt_tokens, "output_tokens": self.count.completion_tokens},
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, {"type": kind, **fields})


def stop_fields(choice: CompletionOutput | None) -> dict[str, str | None]:
    """Why a message ended, in Anthropic's words."""
    reason = choice.finish_reason if choice is not None else None
    if choice is None or reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    if reason == "stop" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "max_tokens" if reason == "length" else "end_turn", "stop_sequence": None}
