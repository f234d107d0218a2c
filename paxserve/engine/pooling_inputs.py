"""Prompts, pairs and parameters of pooling requests, checked and turned into what the engine core runs. No I/O."""

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paxserve.engine.input_processor import Prompt, as_token_ids
from paxserve.errors import RequestError
from paxserve.loaders.text_encoding import EncodedText, Side, cut_text, encode_pair, encode_text
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.messages import EngineRequest, ModelInfo, PoolingInfo
from paxserve.pooling_params import PoolingParams, PoolingTask
from paxserve.sampling_params import SamplingParams

NAMES = {"embed": "Embeddings", "classify": "Classification", "token_embed": "Embeddings"}

# How Qwen3-Reranker was trained to be asked.
YES_NO_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
YES_NO_QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)


class PoolingInputs:
    """Checks pooling requests against one model and one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, model_info: ModelInfo) -> None:
        """`model_info` may be of a model that generates: then every request is refused."""
        self.tokenizer = tokenizer
        self.max_model_len = model_info.max_model_len
        self.vocab_size = model_info.vocab_size
        self.info = model_info.pooling

    def need(self, task: PoolingTask) -> PoolingInfo:
        """What there is to know about the model. Raises `RequestError` if it cannot do `task`."""
        tasks = () if self.info is None else ("embed", "token_embed") if self.info.task == "embed" else ("classify",)
        if self.info is None or task not in tasks:
            raise RequestError(f"The model does not support {NAMES[task]} API", code=404)
        return self.info

    def need_scores(self) -> PoolingInfo:
        """What there is to know about the model. Raises `RequestError` if it cannot compare two texts."""
        if self.info is None:
            raise RequestError("The model does not support Score API", code=404)
        if self.info.task == "classify" and self.info.size != 1:
            raise RequestError("Scoring API is only enabled for num_labels == 1.", code=404)
        return self.info

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        *,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "right",
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        arrival_time: float | None = None,
    ) -> EngineRequest:
        """The request for the engine core; `params.task` must be set. Raises `RequestError` for whatever is wrong."""
        params = self._checked(params)
        limit = self._limit(truncate_prompt_tokens)
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown:
                raise RequestError(f"A prompt has no field {min(map(str, unknown))!r}: this is a text model.", "prompt")
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt", ())
        if isinstance(prompt, str):
            text = self._prepared(prompt, prompt_name)
            encoded = encode_text(
                self._need_tokenizer(), text, limit=limit, side=truncation_side, add_special_tokens=add_special_tokens
            )
            return self._request(request_id, encoded, params, arrival_time)
        token_ids = as_token_ids(prompt)
        wrong = [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]
        if wrong:
            raise RequestError(
                f"Token id {wrong[0]} in prompt is out of vocabulary: ids go from 0 to {self.vocab_size - 1}.", "prompt"
            )
        if limit is not None:
            token_ids = token_ids[:limit] if truncation_side == "right" else token_ids[-limit:]
        return self._request(request_id, EncodedText(token_ids), params, arrival_time)

    def process_pair(
        self,
        request_id: str,
        query: str,
        document: str,
        params: PoolingParams,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        template: str | None = None,
        arrival_time: float | None = None,
    ) -> EngineRequest:
        """The request that scores two texts together: for a model that reads pairs, or one that is asked about them.

        `template` is a Jinja chat template for messages of the roles query and document.
        """
        info, tokenizer = self.need_scores(), self._need_tokenizer()
        limit = self._limit(truncate_prompt_tokens)
        if template is not None:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            options: dict[str, Any] = {} if instruction is None else {"instruction": instruction}
            text = tokenizer.apply_chat_template(messages, chat_template=template, **options)
            encoded = encode_text(tokenizer, text, limit=limit, side="left", add_special_tokens=False)
        elif info.scores_by_tokens:
            text = YES_NO_QUESTION.format(instruction=instruction or YES_NO_INSTRUCTION, query=query, document=document)
            encoded = encode_text(tokenizer, text, limit=limit, side="left", add_special_tokens=False)
        elif instruction is not None:
            raise RequestError(
                "instruction is not supported: this model reads pairs of texts and no more.", "instruction"
            )
        else:
            first, second = (self._prepared(text, None) for text in (query, document))
            encoded = encode_pair(tokenizer, first, second, limit=limit)
        return self._request(request_id, encoded, self._checked(params), arrival_time)

    def cut(self, text: str, limit: int | None, name: str) -> str:
        """The beginning of a text that has at most `limit` tokens; None and 0 are no limit."""
        if not limit:
            return text
        if limit < 0 or limit >= self.max_model_len:
            raise RequestError(f"{name} must be below max_model_len={self.max_model_len} and not negative.", name)
        return cut_text(self._need_tokenizer(), text, limit)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("A text prompt needs a tokenizer, but skip_tokenizer_init is set.", "prompt")
        return self.tokenizer

    def _prepared(self, text: str, prompt_name: str | None) -> str:
        """The text with what the model wants before texts of its purpose, in the letters it knows."""
        assert self.info is not None
        if not text:
            raise RequestError("The prompt must not be empty.", "prompt")
        name = prompt_name or self.info.default_prompt
        if name is not None:
            if name not in self.info.prompts:
                known = ", ".join(self.info.prompts) or "none"
                raise RequestError(f"The model has no prompt named {name!r}: it has {known}.", "prompt_name")
            text = self.info.prompts[name] + text
        return text.lower() if self.info.lower_case else text

    def _limit(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        if truncate == -1:
            return self.max_model_len
        if not 1 <= truncate <= self.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be -1, or from 1 to max_model_len={self.max_model_len}, got {truncate}.",
                "truncate_prompt_tokens",
            )
        return truncate

    def _checked(self, params: PoolingParams) -> PoolingParams:
        assert params.task is not None
        info = self.need(params.task)
        if params.dimensions is None:
            return copy.copy(params)
        if params.task == "classify":
            raise RequestError("Task 'classify' only supports ['use_activation'] parameters.", "dimensions")
        if not info.is_matryoshka:
            raise RequestError(
                "The model does not support Matryoshka embeddings; dimensions must be unset "
                f"(received dimensions={params.dimensions}).",
                "dimensions",
            )
        if params.dimensions > info.size:
            raise RequestError(
                f"The model only supports dimensions in range [1, {info.size}], got {params.dimensions}.", "dimensions"
            )
        if info.matryoshka_dimensions and params.dimensions not in info.matryoshka_dimensions:
            raise RequestError(
                f"The model only supports Matryoshka dimensions {info.matryoshka_dimensions}, got {params.dimensions}.",
                "dimensions",
            )
        return copy.copy(params)

    def _request(
        self, request_id: str, encoded: EncodedText, params: PoolingParams, arrival_time: float | None
    ) -> EngineRequest:
        count = len(encoded.token_ids)
        if not count:
            raise RequestError("The prompt must not be empty.", "prompt")
        if count > self.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains "
                f"{count} input tokens. Please reduce its length, or set truncate_prompt_tokens.",
                "input_tokens",
            )
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=encoded.token_ids,
            params=SamplingParams(),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            pooling=params,
            num_first=encoded.num_first,
        )


def as_pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """1 with N, or N with N texts, as pairs. Raises `RequestError` for other numbers."""
    if not first or not second:
        raise RequestError("At least one text is needed on each side.")
    if len(first) not in (1, len(second)):
        raise RequestError(f"Input lengths must be either 1:1, 1:N or N:N, got {len(first)}:{len(second)}.")
    return list(zip(first if len(first) > 1 else [first[0]] * len(second), second, strict=True))
