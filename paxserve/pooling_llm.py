"""The pooling half of the offline API: vectors, classes and scores, under vLLM's names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from paxserve.engine.engine_core import EngineCore
from paxserve.engine.input_processor import Prompt, as_prompts
from paxserve.engine.pooling_core import PoolingCore
from paxserve.engine.pooling_inputs import PoolingInputs, as_pairs
from paxserve.engine.pooling_results import cosine_score, read_pooled
from paxserve.errors import EngineDeadError, RequestError
from paxserve.interrupt import deferred_interrupt
from paxserve.messages import EngineRequest
from paxserve.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from paxserve.pooling_params import PoolingParams, PoolingTask
from paxserve.progress import Progress

UseTqdm = bool | Callable[..., tqdm]
ParamsChoice = PoolingParams | Sequence[PoolingParams] | None
Pooled = PoolingRequestOutput[PoolingOutput]
TOKENIZATION = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


class PoolingMethods:
    """Methods of `LLM` for pooling models; each raises `RequestError` if the model cannot do it."""

    _core: EngineCore | PoolingCore
    _pooling_inputs: PoolingInputs
    _request_ids: Iterator[str]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: ParamsChoice = None,
        *,
        use_tqdm: UseTqdm = True,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[Pooled]:
        """The numbers for each prompt, by `pooling_task`: embed, classify or token_embed (a vector a token).

        `tokenization_kwargs` may have truncate_prompt_tokens, truncation_side and add_special_tokens; `prompt_name`
        is one of the checkpoint's own prompts, which goes before each text.
        """
        if pooling_task is None:
            raise RequestError(
                "pooling_task is required for LLM.encode: embed, classify or token_embed. "
                "LLM.embed, LLM.classify and LLM.score know their own.",
                "pooling_task",
            )
        self._pooling_inputs.need(pooling_task)
        options = dict(tokenization_kwargs or {})
        unknown = set(options) - set(TOKENIZATION)
        if unknown:
            raise RequestError(f"tokenization_kwargs has {min(unknown)!r}: expected {', '.join(TOKENIZATION)}.")
        prompts = as_prompts(prompts)
        params = _as_params(pooling_params, len(prompts), pooling_task)
        process = self._pooling_inputs.process
        requests = [
            process(next(self._request_ids), prompt, own, prompt_name=prompt_name, **options)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        return self._pool(requests, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: ParamsChoice = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt."""
        results = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="embed", tokenization_kwargs=tokenization_kwargs,
            prompt_name=prompt_name,
        )  # fmt: skip
        return [EmbeddingRequestOutput(**_with(result, EmbeddingOutput(_numbers(result)))) for result in results]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: ParamsChoice = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class, for each prompt."""
        results = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="classify", tokenization_kwargs=tokenization_kwargs
        )
        return [
            ClassificationRequestOutput(**_with(result, ClassificationOutput(_numbers(result)))) for result in results
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with one, one with each of many, or many with as many.

        A cross-encoder reads both at once; of an embedding model it is the cosine of the two vectors.
        `chat_template` (of messages query and document) and `instruction` are for language models that are asked.
        """
        info = self._pooling_inputs.need_scores()
        pairs = as_pairs(*([data] if isinstance(data, str) else list(data) for data in (data_1, data_2)))
        params = pooling_params or PoolingParams()
        if info.task == "embed":
            return self._score_vectors(pairs, params, truncate_prompt_tokens, use_tqdm)
        (params,) = _as_params(params, 1, "classify")
        process = self._pooling_inputs.process_pair
        requests = [
            process(
                next(self._request_ids), *pair, params, template=chat_template, instruction=instruction,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            for pair in pairs
        ]  # fmt: skip
        results = self._pool(requests, use_tqdm)
        return [ScoringRequestOutput(**_with(result, ScoringOutput(_numbers(result)[0]))) for result in results]

    def _score_vectors(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, truncate: int | None, use_tqdm: UseTqdm
    ) -> list[ScoringRequestOutput]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        results = self.encode(
            texts, params, use_tqdm=use_tqdm, pooling_task="embed",
            tokenization_kwargs={"truncate_prompt_tokens": truncate},
        )  # fmt: skip
        by_text = dict(zip(texts, results, strict=True))
        return [
            ScoringRequestOutput(
                request_id=f"{first.request_id}_{second.request_id}",
                outputs=ScoringOutput(cosine_score(first.outputs.data, second.outputs.data)),
                prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
            )
            for first, second in ((by_text[a], by_text[b]) for a, b in pairs)
        ]

    def _pool(self, requests: Sequence[EngineRequest], use_tqdm: UseTqdm) -> list[Pooled]:
        """Run all requests to their end; whatever goes wrong, nothing of them is left behind."""
        by_id = {request.request_id: request for request in requests}
        finished: dict[str, Pooled] = {}
        progress = Progress(len(requests), use_tqdm)
        try:
            with deferred_interrupt() as is_interrupted:
                for request in requests:
                    self._core.add_request(request)
                while len(finished) < len(requests):
                    if is_interrupted():
                        raise KeyboardInterrupt
                    if not self._core.has_unfinished_requests():
                        raise EngineDeadError("The engine has nothing left to run, yet requests were not answered.")
                    done = [read_pooled(by_id[output.request_id], output) for output in self._core.step()]
                    finished |= {output.request_id: output for output in done}
                    progress.note(0, done)
        except BaseException:
            self._core.abort_requests([(request_id, None) for request_id in by_id])
            with suppress(Exception):  # the first error is the one to tell
                while self._core.has_unfinished_requests():
                    self._core.step()
            raise
        finally:
            progress.close()
        return [finished[request.request_id] for request in requests]


def _as_params(params: ParamsChoice, count: int, task: PoolingTask) -> list[PoolingParams]:
    """Parameters for each prompt, with their task set."""
    given = [params or PoolingParams()] * count if params is None or isinstance(params, PoolingParams) else list(params)
    if len(given) != count or not all(isinstance(own, PoolingParams) for own in given):
        raise RequestError(f"pooling_params must be PoolingParams, or {count} of them.", "pooling_params")
    for own in given:
        if own.task not in (None, task):
            raise RequestError(f"You cannot overwrite task={own.task!r} with {task!r}.", "task")
    return [PoolingParams(use_activation=own.use_activation, dimensions=own.dimensions, task=task) for own in given]


def _numbers(result: Pooled) -> list[float]:
    return np.asarray(result.outputs.data).tolist()


def _with(result: Pooled, outputs: Any) -> dict[str, Any]:
    """The fields of a result with other outputs."""
    return {
        "request_id": result.request_id,
        "outputs": outputs,
        "prompt_token_ids": result.prompt_token_ids,
        "metrics": result.metrics,
    }
