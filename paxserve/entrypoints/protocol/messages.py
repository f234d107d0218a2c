"""The bodies of /v1/messages, and the chat that they are."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paxserve.entrypoints.protocol.chat import MAX_MESSAGES, ChatMessage, ChatRequest
from paxserve.entrypoints.protocol.generation import ApiModel
from paxserve.errors import RequestError
from paxserve.server_config import ServerConfig

Blocks = str | list[dict[str, Any]]


class AnthropicMessage(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Thinking(BaseModel):
    """Whether the model is to think aloud."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "adaptive", "disabled"]


class CountTokensRequest(ApiModel):
    """A conversation."""

    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what is not offered."""
        super().check(config)
        if self.tools and (self.tool_choice or {}).get("type") != "none":
            raise RequestError("Tool calls are not supported by this server: leave tools out.", "tools")
        if self.thinking is not None and self.thinking.type != "disabled":
            raise RequestError("thinking is not supported by this server: no reasoning parser is set.", "thinking")
        if self.output_config:
            raise RequestError("output_config is not supported by this server.", "output_config")

    def chat_messages(self) -> list[ChatMessage]:
        """The conversation in the form that chats have. Raises `RequestError` for what is no text."""
        system = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        rest = [message for given in self.messages for message in chat_messages(given)]
        return [ChatMessage.model_validate(message) for message in (*system, *rest)]

    def chat(self) -> ChatRequest:
        """The chat that is meant."""
        kwargs = {"enable_thinking": False} if self.thinking is not None else None
        return ChatRequest.model_validate({"messages": self.chat_messages(), "chat_template_kwargs": kwargs})


class MessagesRequest(CountTokensRequest):
    """Answer a conversation."""

    model: str = Field(min_length=1)  # type: ignore[assignment]
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def chat(self) -> ChatRequest:
        """The chat that is meant."""
        chat = super().chat()
        chat.max_tokens, chat.stop, chat.stream = self.max_tokens, self.stop_sequences, self.stream
        chat.temperature, chat.top_p, chat.top_k = self.temperature, self.top_p, self.top_k
        return chat


def text_of(content: Any) -> str:
    """The text of a content, whichever form it has."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content or ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("thinking", "redacted_thinking"):
            continue  # thoughts are not shown to the model again
        if kind != "text" or not isinstance(block.get("text"), str):
            raise RequestError(
                f"Content blocks must be texts, got {str(kind)[:64]!r}: this model reads text.", "messages"
            )
        texts.append(block["text"])
    return "\n".join(texts)


def chat_messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message as one or, where it holds results of tools, several messages of a chat."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    calls, results, texts = [], [], []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": str(block.get("tool_use_id"))}
            results.append(result | {"content": text_of(block.get("content"))})
        else:
            texts.append(block)
    said: list[dict[str, Any]] = []
    if texts or not results:
        said = [{"role": message.role, "content": text_of(texts), **({"tool_calls": calls} if calls else {})}]
    return [*results, *said]
