"""The bodies of /v1/responses, and what of them a chat is made of."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paxserve.entrypoints.protocol.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from paxserve.entrypoints.protocol.generation import SamplingFields, make_sampling_params
from paxserve.errors import RequestError
from paxserve.sampling_params import SamplingParams
from paxserve.server_config import ServerConfig

TEXT_PARTS = {"input_text", "output_text", "text"}
LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(BaseModel):
    """How much the model is to think."""

    model_config = ConfigDict(extra="forbid")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(BaseModel):
    """The form of the text; only plain text is offered."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"


class TextOptions(BaseModel):
    """What the text is to be like."""

    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(SamplingFields):
    """Answer one input, or go on with a stored conversation."""

    input: str | list[dict[str, Any]] = Field(max_length=MAX_MESSAGES * 64)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    background: bool | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = Field(None, ge=0)
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        if self.n not in (None, 1):
            raise RequestError("n must be 1: a response has one answer.", "n")
        if self.use_beam_search:
            raise RequestError("use_beam_search is not offered for responses.", "use_beam_search")
        if self.max_tokens is not None:
            raise RequestError("max_tokens is not a field of responses. Use max_output_tokens.", "max_tokens")
        if self.tools and self.tool_choice != "none":
            raise RequestError("Tool calls are not supported by this server: leave tools out.", "tools")
        if self.text and self.text.format and self.text.format.type != "text":
            raise RequestError("text.format is not supported by this server, except {'type': 'text'}.", "text.format")
        for name in self.include or ():
            if name != LOGPROBS:
                raise RequestError(f"include must name {LOGPROBS} only, got {name[:64]!r}.", "include")
        if self.background and not (config.enable_responses_store and self.store is not False):
            raise RequestError("background needs store, and a server with --enable-responses-store.", "background")

    def is_stored(self, config: ServerConfig) -> bool:
        """Whether the response is to be kept for later retrieval."""
        return config.enable_responses_store and self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are part of the answer."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self, earlier: list[dict[str, Any]]) -> ChatRequest:
        """The conversation: what was said earlier, the instructions, the input."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*system, *earlier, *self.input_messages()]
        if not messages:
            raise RequestError("input must not be empty.", "input")
        return ChatRequest.model_validate({
            "messages": [ChatMessage.model_validate(message) for message in messages],
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        })  # fmt: skip

    def input_messages(self) -> list[dict[str, Any]]:
        """The input as chat messages. Raises `RequestError` for items that are none."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}] if self.input else []
        return [message for item in self.input if (message := item_message(item)) is not None]

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The sampling parameters that this body asks for."""
        values = self.sampling_values(defaults)
        values["max_tokens"] = self.max_output_tokens or defaults.get("max_tokens")
        values["logprobs"] = (self.top_logprobs or 0) if self.wants_logprobs else None
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            values["truncate_prompt_tokens"] = -1
        return make_sampling_params(values)


def item_message(item: dict[str, Any]) -> dict[str, Any] | None:
    """One item of the input as a chat message; None for thoughts, which are not shown to the model again."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError("A message of the input needs a role.", "input")
        return {"role": role, "content": item_text(item.get("content"))}
    if kind == "function_call":
        function = {"name": str(item.get("name")), "arguments": item.get("arguments") or "{}"}
        return {"role": "assistant", "tool_calls": [{"id": str(item.get("call_id")), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": item_text(item.get("output"))}
    if kind == "reasoning":
        return None
    raise RequestError(f"Items of type {str(kind)[:64]!r} are not supported: this model reads text.", "input")


def item_text(content: Any) -> str:
    """The text of an item's content, whichever form it has."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise RequestError(f"Content parts must be texts, got {str(kind)[:64]!r}: this model reads text.", "input")
        texts.append(text)
    return "\n".join(texts)
