"""The bodies of the pooling endpoints."""

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from paxserve.engine.input_processor import Prompt
from paxserve.entrypoints.protocol.generation import MAX_REQUEST_ID, ApiModel, TokenIds, Usage, is_plain_text
from paxserve.errors import RequestError
from paxserve.pooling_params import PoolingParams, PoolingTask
from paxserve.server_config import ServerConfig

MAX_INPUTS = 2048
"""Texts in one body, as in OpenAI's API."""


class PoolingFields(ApiModel):
    """Fields of every pooling endpoint."""

    truncate_prompt_tokens: StrictInt | None = Field(None, ge=-1)
    use_activation: bool | None = None
    request_id: str | None = None

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        if "normalize" in (self.model_extra or {}):
            raise RequestError("Parameter `normalize` was removed; use `use_activation` instead.", "normalize")
        super().check(config)
        if self.request_id is not None and not is_plain_text(self.request_id, MAX_REQUEST_ID):
            raise RequestError(
                f"request_id must have 1 to {MAX_REQUEST_ID} characters and none of @ / \\ NUL.", "request_id"
            )


class InputFields(PoolingFields):
    """Fields of the endpoints that take texts one by one."""

    input: str | list[str] | TokenIds | list[TokenIds]
    add_special_tokens: bool = True
    truncation_side: Literal["left", "right"] | None = None
    prompt_name: str | None = None
    """Which of the checkpoint's own prompts goes before each text; an addition of paxserve's."""

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        if not 1 <= len(self.prompts) <= MAX_INPUTS:
            raise RequestError(f"input must have 1 to {MAX_INPUTS} texts, got {len(self.prompts)}.", "input")

    @property
    def prompts(self) -> list[Prompt]:
        """The texts or lists of token ids, one by one."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]
        return list(self.input)  # type: ignore[arg-type]

    @property
    def options(self) -> dict[str, Any]:
        """How texts become token ids: arguments of `PoolingInputs.process`."""
        return {
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side or "right",
            "add_special_tokens": self.add_special_tokens,
            "prompt_name": self.prompt_name,
        }


class EncodingFields(BaseModel):
    """How numbers are written."""

    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32", "float16"] = "float32"
    endianness: Literal["native", "little", "big"] = "native"


class EmbeddingRequest(InputFields, EncodingFields):
    """The vectors of texts."""

    dimensions: StrictInt | None = None

    def params(self) -> PoolingParams:
        """What is wanted of the engine."""
        return PoolingParams(use_activation=self.use_activation, dimensions=self.dimensions, task="embed")


class PoolingRequest(EmbeddingRequest):
    """What the model makes of texts, whatever that is."""

    task: PoolingTask | None = None


class ClassifyRequest(InputFields):
    """The classes of texts."""


class DocumentText(BaseModel):
    """A text as an object."""

    model_config = ConfigDict(extra="forbid")
    text: str


Texts = str | list[str | DocumentText]


class ScoringFields(PoolingFields):
    """Fields of the endpoints that compare texts."""

    max_tokens_per_query: StrictInt = 0
    max_tokens_per_doc: StrictInt = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        unknown = set(self.chat_template_kwargs or {}) - {"instruction"}
        if unknown:
            raise RequestError(f"chat_template_kwargs may have instruction only, got {min(unknown)[:64]!r}.")

    @property
    def task_instruction(self) -> str | None:
        """What a language model is asked to judge by; the more general field wins, as in vLLM."""
        return (self.chat_template_kwargs or {}).get("instruction", self.instruction)


SCORE_NAMES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreRequest(ScoringFields):
    """How well texts go together; the two sides have several pairs of names."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Both sides' texts. Raises `RequestError` unless exactly one pair of names is used."""
        given = {name for names in SCORE_NAMES for name in names if getattr(self, name) is not None}
        for first, second in SCORE_NAMES:
            if given == {first, second}:
                return as_texts(getattr(self, first), first), as_texts(getattr(self, second), second)
        pairs = "; ".join(f"{first} and {second}" for first, second in SCORE_NAMES)
        raise RequestError(f"Two sides are needed, by one of these pairs of names: {pairs}.")


class RerankRequest(ScoringFields):
    """Documents in the order of how well they go with a query."""

    query: str
    documents: Texts
    top_n: StrictInt = Field(0, ge=0)
    return_documents: bool = True


def as_texts(value: Texts, name: str) -> list[str]:
    """The texts one by one. Raises `RequestError` for too many or none."""
    texts = [value] if isinstance(value, str) else [text if isinstance(text, str) else text.text for text in value]
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise RequestError(f"{name} must have 1 to {MAX_INPUTS} texts, got {len(texts)}.", name)
    return texts


class EmbeddingData(msgspec.Struct):
    """One vector."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class PoolingData(msgspec.Struct):
    """One text's numbers."""

    index: int
    data: list[float] | list[list[float]] | str
    object: str = "pooling"


class ClassifyData(msgspec.Struct):
    """One text's classes."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ScoreData(msgspec.Struct):
    """One pair's score."""

    index: int
    score: float
    object: str = "score"


class PoolingResponse(msgspec.Struct):
    """The answer of all pooling endpoints but /rerank."""

    id: str
    created: int
    model: str
    data: list[EmbeddingData] | list[PoolingData] | list[ClassifyData] | list[ScoreData]
    usage: Usage
    object: str = "list"


class RerankDocument(msgspec.Struct):
    """A document as it was given."""

    text: str
    multi_modal: None = None


class RerankResult(msgspec.Struct, omit_defaults=True):
    """One document's place."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankUsage(msgspec.Struct):
    """How many tokens the request took."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(msgspec.Struct):
    """The answer of /rerank."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
