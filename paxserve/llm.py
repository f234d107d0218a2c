"""The offline API: prompts in, outputs back, with the engine in this process."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tqdm.auto import tqdm

from paxserve.beam_search_params import BeamSearchParams
from paxserve.chat import Message, encode_chat, render_chat_text
from paxserve.config import EngineConfig
from paxserve.engine.cores import open_core
from paxserve.engine.input_processor import InputProcessor, Prompt, as_prompts, prompt_text
from paxserve.engine.output_processor import OutputKind, OutputProcessor
from paxserve.engine.pooling_inputs import PoolingInputs
from paxserve.errors import EngineDeadError, RequestError
from paxserve.interrupt import deferred_interrupt
from paxserve.loaders.checkpoint import open_tokenizer
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.messages import EngineRequest, EngineStats
from paxserve.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from paxserve.pooling_llm import PoolingMethods
from paxserve.progress import Progress
from paxserve.sampling_params import SamplingParams

MAX_DRAIN_STEPS = 8
"""Steps that may still be on their way when everything has been aborted; far more than the pipeline's depth."""

ParamsChoice = SamplingParams | Sequence[SamplingParams] | None


class LLM(PoolingMethods):
    """A model ready to generate, or to pool. Arguments are the engine's flags, as `paxserve serve --help` lists them.

    Not safe to call from several threads. An unknown argument raises `ConfigError`.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        self.config = EngineConfig.from_flags(model=model, **flags)
        model_config = self.config.model
        self._tokenizer = None if model_config.skip_tokenizer_init else open_tokenizer(model_config)
        self._core = open_core(self.config)
        self._inputs = InputProcessor.for_model(model_config, self._tokenizer, self._core.model_info)
        self._outputs = OutputProcessor(self._tokenizer)
        self._pooling_inputs = PoolingInputs(self._tokenizer, self._core.model_info)
        self._request_ids = map(str, itertools.count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsChoice = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in their order.

        A prompt is a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; parameters are
        one for all, or a list with one for each. `priority` (one a prompt, the lowest first) needs
        `scheduling_policy="priority"`. If one prompt is refused (`RequestError`), none is run.
        """
        self._need_generation("generate")
        prompts = as_prompts(prompts)
        params = self._as_params(sampling_params, len(prompts))
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise RequestError(
                f"priority must be one a prompt, got {len(priorities)} for {len(prompts)} prompts.", "priority"
            )
        requests = [
            (self._inputs.process(next(self._request_ids), prompt, own, priority=rank), prompt_text(prompt))
            for prompt, own, rank in zip(prompts, params, priorities, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsChoice = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one conversation (a list of messages), or to each of a list of them."""
        self._need_generation("chat")
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in _as_conversations(messages):
            text = render_chat_text(
                tokenizer,
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "prompt_token_ids": encode_chat(tokenizer, text)})
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """What each step adds to the output of one prompt; closing the iterator, or Ctrl-C, ends the request."""
        self._need_generation("stream")
        params = sampling_params or self.get_default_sampling_params()
        request = self._inputs.process(next(self._request_ids), prompt, params)
        try:
            with deferred_interrupt() as is_interrupted:
                self._outputs.add(request, prompt_text(prompt), kind=OutputKind.DELTA)
                self._core.add_request(request)
                while self._outputs.num_unfinished:
                    if is_interrupted():
                        raise KeyboardInterrupt
                    news: dict[str, RequestOutput] = {}
                    self._step(news, Progress(1, False))
                    yield from news.values()
        except BaseException:
            self._abort_all()
            raise
        self._drain()

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool | Callable[..., tqdm] = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best outputs of each prompt, found as transformers' `generate(num_beams=...)` finds them.

        Unlike vLLM's, a score counts the tokens of the output alone, with the one that ends it.
        """
        self._need_generation("beam_search")
        prompts = as_prompts(prompts)
        sampling = SamplingParams(
            n=params.beam_width, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, logprobs=params.beam_width,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )  # fmt: skip
        requests = [
            (self._inputs.process(next(self._request_ids), prompt, sampling, beam_search=params), prompt_text(prompt))
            for prompt in prompts
        ]
        return [self._as_beams(output, params) for output in self._run(requests, use_tqdm)]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `RequestError` with `skip_tokenizer_init`."""
        if self._tokenizer is None:
            raise RequestError("There is no tokenizer: skip_tokenizer_init is set.")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that are used when none are given: the model's generation config over the neutral values."""
        return self._inputs.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; whether that was possible."""
        return self._core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Gauges and counters of the engine."""
        return self._core.stats()

    def _need_generation(self, method: str) -> None:
        if self._core.model_info.pooling is not None:
            raise RequestError(
                f"LLM.{method}() is only supported for generative models: this one gives vectors or scores. "
                "Try runner='generate' if the model can do both."
            )

    def _as_beams(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        prompt = output.prompt
        if prompt is None:
            prompt = (
                self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) if self._tokenizer else ""
            )
        sequences = []
        for choice in output.outputs:
            logprob = choice.cumulative_logprob
            assert logprob is not None, "a beam came without its log-probability"
            sequence = BeamSearchSequence(
                tokens=[*output.prompt_token_ids, *choice.token_ids],
                text=prompt + choice.text,
                cum_logprob=logprob,
                score=logprob / len(choice.token_ids) ** params.length_penalty,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=choice.logprobs,
            )
            sequences.append(sequence)
        return BeamSearchOutput(sequences=sequences)

    def _as_params(self, sampling_params: ParamsChoice, count: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
            raise RequestError("sampling_params must be SamplingParams or a list of them.", "sampling_params")
        if len(sampling_params) != count:
            raise RequestError(
                f"sampling_params must be one for all or one a prompt, got {len(sampling_params)} for {count} prompts.",
                "sampling_params",
            )
        return list(sampling_params)

    def _run(
        self, requests: Sequence[tuple[EngineRequest, str | None]], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        """Run all requests to their end; whatever goes wrong, nothing of them is left behind."""
        finished: dict[str, RequestOutput] = {}
        progress = Progress(len(requests), use_tqdm)
        try:
            with deferred_interrupt() as is_interrupted:
                for request, text in requests:
                    self._outputs.add(request, text, kind=OutputKind.FINAL_ONLY)
                    self._core.add_request(request)
                while self._outputs.num_unfinished:
                    if is_interrupted():
                        raise KeyboardInterrupt
                    self._step(finished, progress)
                self._drain()
        except BaseException:
            self._abort_all()
            raise
        finally:
            progress.close()
        return [finished[request.request_id] for request, _ in requests]

    def _step(self, finished: dict[str, RequestOutput], progress: Progress) -> None:
        if not self._core.has_unfinished_requests():
            raise EngineDeadError("The engine has nothing left to run, yet some requests were not answered.")
        outputs = self._core.step()
        done, aborts = self._outputs.process(outputs)
        if aborts:
            self._core.abort_requests(aborts)
        finished |= {output.request_id: output for output in done}
        progress.note(sum(len(output.new_token_ids) for output in outputs), done)

    def _abort_all(self) -> None:
        request_ids = self._outputs.request_ids()
        self._outputs.abort(request_ids)
        self._core.abort_requests([(request_id, None) for request_id in request_ids])
        # What went wrong is being raised; if the core is broken, a second error would only hide it.
        with suppress(Exception):
            self._drain()

    def _drain(self) -> None:
        """Let the steps that are on their way retire, so that their pages are free."""
        for _ in range(MAX_DRAIN_STEPS):
            if not self._core.has_unfinished_requests():
                return
            self._core.step()


def _as_conversations(messages: Any) -> list[Any]:
    """The conversations one by one; a list of messages is a single one."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages, or a list of such lists.", "messages")
    if messages and all(isinstance(conversation, (list, tuple)) for conversation in messages):
        return list(messages)
    return [messages]
