"""POST /v1/chat/completions: answer a conversation."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.entrypoints.context import ServingContext, context_of, json_response, public_id
from paxserve.entrypoints.conversation import chat_prompt
from paxserve.entrypoints.generation import Batch, OpenAIWriter, TokenCount, answer
from paxserve.entrypoints.logprobs import LogprobWriter
from paxserve.entrypoints.protocol.chat import (
    AssistantMessage,
    BatchChatRequest,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatOptions,
    ChatRequest,
    ChatResponse,
    Conversation,
    DeltaMessage,
)
from paxserve.entrypoints.sse import event
from paxserve.messages import EngineRequest
from paxserve.outputs import CompletionOutput, RequestOutput

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await answer_chats(request, body, [body.messages])


@router.post("/v1/chat/completions/batch")
async def create_batch_chat_completion(body: BatchChatRequest, request: Request) -> Response:
    """Answer several conversations, a choice each."""
    return await answer_chats(request, body, body.messages)


async def answer_chats(request: Request, body: ChatOptions, conversations: Sequence[Conversation]) -> Response:
    """Answer conversations, all of them checked before any is begun."""
    context = context_of(request)
    model = context.model_name(body.model)
    body.check(context.server_config)
    body.take_headers(request.headers)
    params = body.sampling_params(context.default_values)
    answer_id = public_id("chatcmpl", request, body.request_id)
    prompts = [await chat_prompt(context, body, messages, request) for messages in conversations]
    token_ids = [prompt.token_ids for prompt in prompts]
    requests = await context.engine.prepare_all(answer_id, token_ids, params, **body.engine_options())
    last = conversations[0][-1]
    writer = ChatWriter(context, body, requests, last, answer_id, model)
    writer.prompt_text = prompts[0].text if body.return_prompt_text and len(prompts) == 1 else None
    return await answer(request, context, requests, [None] * len(requests), writer, body)


class ChatWriter(OpenAIWriter):
    """Writes the answer to a chat request, whole or in chunks; `last` is the message before the answer."""

    def __init__(
        self,
        context: ServingContext,
        body: ChatOptions,
        requests: Sequence[EngineRequest],
        last: ChatMessage,
        answer_id: str,
        model: str,
    ) -> None:
        self.context, self.body, self.requests = context, body, requests
        self.answer_id, self.model, self.created = answer_id, model, int(time.time())
        self.count = TokenCount(requests, has_details=context.server_config.enable_prompt_tokens_details)
        self.prompt_text: str | None = None
        self.role = context.server_config.response_role if body.add_generation_prompt else last.role
        is_echoed = body.echo and last.role == self.role and isinstance(last.content, str)
        self.echo = str(last.content) if is_echoed else ""
        tokenizer = context.engine.input_processor.tokenizer
        self.logprobs = LogprobWriter(tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))

    def open(self) -> bytes:
        """A chunk with the role, and one with the echo if asked for, for each choice."""
        chunks = []
        for index in range(self.requests[0].params.n):
            delta = ChatDelta(index, DeltaMessage(role=self.role, content=""), None, None)
            chunk = self._chunk(delta)
            chunk.prompt_token_ids = self.requests[0].prompt_token_ids if self.body.return_token_ids else None
            chunk.prompt_text = self.prompt_text
            chunks.append(event(chunk))
            if self.echo:
                echo = ChatDelta(index, DeltaMessage(content=self.echo), None, None, token_ids=None)
                chunks.append(event(self._chunk(echo)))
        return b"".join(chunks)

    def write(self, batch: Batch) -> bytes:
        """A chunk for each choice that has news."""
        chunks = []
        for position, output in batch:
            self.count.add(position, output)
            for choice in output.outputs:
                logprobs = self._logprobs(choice)
                has_ids = bool(self.body.return_token_ids and choice.token_ids)
                if choice.text or choice.finish_reason or logprobs or has_ids or self.body.continuous_usage:
                    chunks.append(event(self._delta(choice, logprobs)))
        return b"".join(chunks)

    def finish(self) -> bytes:
        """The usage chunk, if asked for."""
        if not self.body.include_usage:
            return b""
        chunk = ChatChunk(self.answer_id, "chat.completion.chunk", self.created, self.model, [])
        chunk.usage = self.count.stream_usage()
        chunk.system_fingerprint = self.context.system_fingerprint
        return event(chunk)

    def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        """The whole answer."""
        for position, output in enumerate(outputs):
            self.count.add(position, output)
        first = outputs[0] if len(outputs) == 1 else None
        prompt = first.prompt_logprobs if first else None
        response = ChatResponse(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            choices=self._choices(outputs),
            usage=self.count.usage(),
            system_fingerprint=self.context.system_fingerprint,
            prompt_logprobs=self.logprobs.prompt(prompt) if prompt is not None else None,
            prompt_token_ids=first.prompt_token_ids if first and self.body.return_token_ids else None,
            prompt_text=self.prompt_text,
        )
        return json_response(response)

    def _chunk(self, delta: ChatDelta) -> ChatChunk:
        chunk = ChatChunk(self.answer_id, "chat.completion.chunk", self.created, self.model, [delta])
        if self.body.continuous_usage:
            chunk.usage = self.count.stream_usage()
        return chunk

    def _delta(self, choice: CompletionOutput, logprobs: ChatLogprobs | None) -> ChatChunk:
        delta = ChatDelta(choice.index, DeltaMessage(content=choice.text), logprobs, choice.finish_reason)
        delta.token_ids = choice.token_ids if self.body.return_token_ids else None
        chunk = self._chunk(delta)
        if choice.finish_reason is not None:
            delta.stop_reason = choice.stop_reason
            if not self.body.include_usage:
                chunk.system_fingerprint = self.context.system_fingerprint
        return chunk

    def _choices(self, outputs: Sequence[RequestOutput]) -> list[ChatChoice]:
        n = self.requests[0].params.n
        choices = [
            self._choice(position * n + choice.index, choice)
            for position, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return sorted(choices, key=lambda choice: choice.index)

    def _choice(self, index: int, choice: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(self.role, self.echo + choice.text),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.body.return_token_ids else None,
        )

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs or choice.logprobs is None:
            return None
        return self.logprobs.chat(choice.token_ids, choice.logprobs, self.body.top_logprobs or 0)
