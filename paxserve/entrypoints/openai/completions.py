"""POST /v1/completions: continue one or several prompts."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from paxserve.engine.input_processor import prompt_text
from paxserve.entrypoints.context import ServingContext, context_of, json_response, public_id
from paxserve.entrypoints.generation import Batch, OpenAIWriter, TokenCount, answer
from paxserve.entrypoints.logprobs import LogprobWriter
from paxserve.entrypoints.protocol.completions import (
    CompletionChoice,
    CompletionChunk,
    CompletionDelta,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from paxserve.entrypoints.sse import event
from paxserve.messages import EngineRequest
from paxserve.outputs import CompletionOutput, RequestOutput

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    context = context_of(request)
    model = context.model_name(body.model)
    body.check(context.server_config)
    body.take_headers(request.headers)
    params = body.sampling_params(context.default_values)
    answer_id = public_id("cmpl", request, body.request_id)
    special = body.add_special_tokens is not False
    requests = await context.engine.prepare_all(
        answer_id, body.prompts, params, add_special_tokens=special, **body.engine_options()
    )
    writer = CompletionWriter(context, body, requests, answer_id, model)
    prompts = [prompt_text(prompt) for prompt in body.prompts]
    return await answer(request, context, requests, prompts, writer, body)


class CompletionWriter(OpenAIWriter):
    """Writes the answer to a completion request, whole or in chunks."""

    def __init__(
        self,
        context: ServingContext,
        body: CompletionRequest,
        requests: Sequence[EngineRequest],
        answer_id: str,
        model: str,
    ) -> None:
        self.context, self.body, self.requests = context, body, requests
        self.answer_id, self.model, self.created = answer_id, model, int(time.time())
        self.num_choices = requests[0].params.n
        self.count = TokenCount(requests, has_details=context.server_config.enable_prompt_tokens_details)
        tokenizer = context.engine.input_processor.tokenizer
        self.logprobs = LogprobWriter(tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self.echoes = [self._echo(position) for position in range(len(requests))] if body.echo else []
        self.offsets: dict[int, int] = {}
        """Length of each choice's text so far, by its index in the answer."""
        self.prompt_parts: dict[int, CompletionLogprobs] = {}

    def open(self) -> bytes:
        """Nothing: completions have no opening chunk."""
        return b""

    def write(self, batch: Batch) -> bytes:
        """A chunk for each choice that has news."""
        chunks = []
        for position, output in batch:
            self._keep_prompt_logprobs(position, output)
            if not self.body.is_prompt_only:
                self.count.add(position, output)
            for choice in output.outputs:
                delta = self._delta(position, output, choice)
                if self._says_something(delta):
                    chunks.append(self._chunk(delta))
        return b"".join(chunks)

    def finish(self) -> bytes:
        """The usage chunk, if asked for."""
        if not self.body.include_usage:
            return b""
        chunk = CompletionChunk(self.answer_id, "text_completion", self.created, self.model, [])
        chunk.usage = self.count.stream_usage()
        chunk.system_fingerprint = self.context.system_fingerprint
        return event(chunk)

    def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        """The whole answer."""
        choices = []
        for position, output in enumerate(outputs):
            self._keep_prompt_logprobs(position, output)
            if self.body.is_prompt_only:
                self.count.add(position, RequestOutput(
                    request_id="", prompt=None, prompt_token_ids=[], num_cached_tokens=output.num_cached_tokens
                ))  # fmt: skip
            else:
                self.count.add(position, output)
            choices += [self._choice(position, output, choice) for choice in output.outputs]
        response = CompletionResponse(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            choices=sorted(choices, key=lambda choice: choice.index),
            usage=self.count.usage(),
            system_fingerprint=self.context.system_fingerprint,
        )
        return json_response(response)

    def _chunk(self, delta: CompletionDelta) -> bytes:
        chunk = CompletionChunk(self.answer_id, "text_completion", self.created, self.model, [delta])
        if self.body.continuous_usage:
            chunk.usage = self.count.stream_usage()
        if delta.finish_reason is not None and not self.body.include_usage:
            chunk.system_fingerprint = self.context.system_fingerprint
        return event(chunk)

    def _says_something(self, delta: CompletionDelta) -> bool:
        news = delta.text or delta.finish_reason or delta.logprobs or delta.token_ids
        return bool(news) or self.body.continuous_usage

    def _delta(self, position: int, output: RequestOutput, choice: CompletionOutput) -> CompletionDelta:
        index = position * self.num_choices + choice.index
        is_first = index not in self.offsets
        text, logprobs = self._text_and_logprobs(position, index, choice)
        return CompletionDelta(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
            prompt_token_ids=output.prompt_token_ids if self.body.return_token_ids and is_first else None,
            token_ids=choice.token_ids if self.body.return_token_ids else None,
        )

    def _choice(self, position: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        index = position * self.num_choices + choice.index
        text, logprobs = self._text_and_logprobs(position, index, choice)
        prompt = output.prompt_logprobs if self.body.prompt_logprobs is not None else None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=self._finish_reason(choice),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.body.return_token_ids else None,
            prompt_logprobs=self.logprobs.prompt(prompt) if prompt is not None else None,
            prompt_token_ids=output.prompt_token_ids if self.body.return_token_ids else None,
        )

    def _finish_reason(self, choice: CompletionOutput) -> str | None:
        return "length" if self.body.is_prompt_only and choice.finish_reason else choice.finish_reason

    def _text_and_logprobs(
        self, position: int, index: int, choice: CompletionOutput
    ) -> tuple[str, CompletionLogprobs | None]:
        """What a choice adds, preceded by the prompt the first time if it is to be echoed."""
        offset = self.offsets.get(index)
        prefix = self.echoes[position] if offset is None and self.echoes else ""
        text = "" if self.body.is_prompt_only else choice.text
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = CompletionLogprobs([], [], [], [])
            if offset is None and position in self.prompt_parts:
                append_logprobs(logprobs, self.prompt_parts[position])
            if not self.body.is_prompt_only:
                start = (offset or 0) + len(prefix)
                append_logprobs(logprobs, self.logprobs.completion(choice.token_ids, choice.logprobs or [], start))
        self.offsets[index] = (offset or 0) + len(prefix) + len(text)
        return prefix + text, logprobs

    def _keep_prompt_logprobs(self, position: int, output: RequestOutput) -> None:
        if self.echoes and self.body.logprobs is not None and output.prompt_logprobs is not None:
            entries = output.prompt_logprobs
            self.prompt_parts[position] = self.logprobs.completion(output.prompt_token_ids, entries, 0)

    def _echo(self, position: int) -> str:
        """The text of a prompt, as it was given or (token ids, a cut text) as its ids read."""
        prompt = prompt_text(self.body.prompts[position])
        if prompt is not None and self.body.truncate_prompt_tokens is None:
            return prompt
        token_ids = self.requests[position].prompt_token_ids
        return self.context.tokenizer.decode(token_ids, skip_special_tokens=False)


def append_logprobs(written: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Put `more` behind what is written."""
    written.text_offset += more.text_offset
    written.tokens += more.tokens
    written.token_logprobs += more.token_logprobs
    written.top_logprobs += more.top_logprobs
