"""The one tokenizer class of the engine, wherever the vocabulary was read from."""

import functools
import threading
from collections.abc import Mapping, Sequence

import tokenizers

from paxserve.errors import RequestError
from paxserve.loaders.chat_template import ChatTemplates


class Tokenizer(ChatTemplates):
    """Text to token ids and back; safe to call from several threads.

    `backend` is the `tokenizers.Tokenizer` underneath. To decode a stream token by token, make one
    `tokenizers.decoders.DecodeStream(skip_special_tokens=…)` a sequence and call `step(tokenizer.backend, token_id)`:
    it returns the new text, or None while a character is incomplete.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        has_token_types: bool = False,
    ) -> None:
        """`special_tokens` maps roles such as bos_token to text; `chat_templates` maps names to Jinja.

        `has_token_types` says that the model is told which of two texts each token is of.
        """
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        super().__init__(special_tokens or {}, chat_templates or {})
        self.has_token_types = has_token_types
        added = backend.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        special_ids |= {i for i in map(self._special_id, self.special_tokens) if i is not None}
        self.all_special_ids: list[int] = sorted(special_ids)
        self.bos_token_id: int | None = self._special_id("bos_token")
        self.eos_token_id: int | None = self._special_id("eos_token")
        self.pad_token_id: int | None = self._special_id("pad_token")
        # Added tokens may leave gaps, so the last id counts, not the number of tokens.
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=0))
        self._lock = threading.Lock()
        self._literal_backend: tokenizers.Tokenizer | None = None

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token: a text of N times as many has more than N tokens."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = True) -> list[int]:
        """The ids of `text`, with BOS and the like if `add_special_tokens`.

        Without `parse_special`, special tokens that are spelled out in the text are text like any other.
        """
        backend = self.backend if parse_special else self._get_literal_backend()
        try:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # JSON may spell half a character, such as "\ud83d"
            raise RequestError("The text is not valid Unicode: it holds half a surrogate pair.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, exactly as streaming would give it (no clean-up of spaces)."""
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise RequestError(f"Token ids must lie between 0 and {self.vocab_size - 1}.") from error

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's spelling of each id, None for an id that it lacks."""
        return [self.backend.id_to_token(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        """The id of each vocabulary entry, None for an entry that there is not."""
        return [self.backend.token_to_id(token) for token in tokens]

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    def _get_literal_backend(self) -> tokenizers.Tokenizer:
        # A second one, because encode_special_tokens is a setting of the whole object, not of a call.
        with self._lock:
            if self._literal_backend is None:
                literal = tokenizers.Tokenizer.from_str(self.backend.to_str())
                literal.encode_special_tokens = True
                self._literal_backend = literal
            return self._literal_backend
