"""The bodies of /tokenize and /detokenize."""

import msgspec

from paxserve.entrypoints.protocol.chat import Conversation, TemplateOptions
from paxserve.entrypoints.protocol.generation import ApiModel, TokenIds
from paxserve.server_config import ServerConfig


class TokenizePromptRequest(ApiModel):
    """Show the token ids of a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ApiModel, TemplateOptions):
    """Show the token ids of a conversation, as a chat would use them."""

    messages: Conversation
    return_token_strs: bool = False

    def check(self, config: ServerConfig) -> None:
        """Raise `RequestError` for what the field types cannot express."""
        super().check(config)
        self.check_template_fields()


class DetokenizeRequest(ApiModel):
    """Show the text of token ids."""

    tokens: TokenIds


class TokenizeResponse(msgspec.Struct):
    """Token ids, and their texts when asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    """The text of token ids."""

    prompt: str
