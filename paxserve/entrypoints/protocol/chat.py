"""The bodies of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from paxserve.entrypoints.protocol.generation import (
    PromptLogprob,
    SamplingFields,
    StreamUsage,
    Usage,
    at_most,
    make_sampling_params,
)
from paxserve.errors import RequestError
from paxserve.sampling_params import SamplingParams
from paxserve.server_config import ServerConfig

MAX_MESSAGES = 65536


class ContentPart(BaseModel):
    """A part of a message's content; only text is understood."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    """A call that the assistant made earlier in the conversation."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """A tool call of an earlier assistant message."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of the conversation; fields that are not named here go to the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=256)
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as a plain dictionary, with what was not sent left out."""
        return self.model_dump(exclude_unset=True)


class FunctionDefinition(BaseModel):
    """A function that the model may be told about."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that the model may be told about."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


Conversation = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation as plain dictionaries."""
    return [message.for_template() for message in messages]


class TemplateOptions(BaseModel):
    """The fields that decide how a conversation becomes a prompt; /tokenize has them too."""

    tools: list[Tool] | None = Field(None, min_length=1)
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_template_fields(self) -> None:
        """Raise `RequestError` for options that contradict each other."""
        wants_new = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and wants_new:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message"
            )

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the beginning of a new answer."""
        return self.add_generation_prompt and not self.continue_final_message

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as plain dictionaries."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None


class ChatOptions(SamplingFields, TemplateOptions):
    """What can be asked of an answer to a conversation."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None

    def set_defaults(self, config: ServerConfig) -> None:
        """Fill in what the server says where the request does not."""
        super().set_defaults(config)
        if config.exclude_tools_when_tool_choice_none and self.tool_choice == "none":
            self.tools = None

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        self.check_template_fields()
        self._check_tool_choice()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
        limit = self.token_limit
        if limit is not None and limit < 1:
            raise RequestError(f"max_tokens must be at least 1, got {limit}.", "max_tokens")

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice or ("auto" if self.tools else "none")
        if choice == "none":
            return
        if not self.tools:
            raise RequestError("tool_choice needs tools.", "tool_choice")
        if isinstance(choice, str) and choice not in ("auto", "required"):
            expected = "none, auto, required or a function"
            raise RequestError(f"tool_choice must be {expected}, got {choice[:64]!r}.", "tool_choice")
        raise RequestError(
            "Tool calls are not supported by this server: with tools, tool_choice must be 'none'.", "tool_choice"
        )

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None is what the context leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The sampling parameters that this body asks for."""
        values = self.sampling_values(defaults)
        limit = self.token_limit
        values["max_tokens"] = defaults.get("max_tokens") if limit is None else limit
        values["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        values["prompt_logprobs"] = self.prompt_logprobs
        return make_sampling_params(values)


class ChatRequest(ChatOptions):
    """Answer a conversation."""

    messages: Conversation


class BatchChatRequest(ChatOptions):
    """Answer several conversations, a choice each."""

    messages: list[Conversation] = Field(min_length=1)

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        at_most("messages", "conversations", self.messages, config.max_prompts)
        refused = {
            "stream": self.stream, "tools": self.tools, "n": self.n not in (None, 1), "echo": self.echo,
            "use_beam_search": self.use_beam_search,
        }  # fmt: skip
        for name, is_given in refused.items():
            if is_given:
                raise RequestError(f"{name} is not offered for batches of conversations.", name)


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The chosen token at a position, and its rivals."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities, one entry a token."""

    content: list[TokenLogprob]


class AssistantMessage(msgspec.Struct):
    """The answer of the model."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


class ChatChoice(msgspec.Struct):
    """One finished choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None = None


class ChatResponse(msgspec.Struct):
    """The answer to a request that does not stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None = None
    object: str = "chat.completion"
    service_tier: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class DeltaMessage(msgspec.Struct):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What a chunk adds to one choice."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | None | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatDelta]
    usage: StreamUsage | UnsetType = UNSET
    system_fingerprint: str | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_text: str | None | UnsetType = UNSET
