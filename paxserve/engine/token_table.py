"""What each token id of a tokenizer stands for, as bytes: the ground that detokenizing and logprobs stand on."""

import functools
import json
from typing import Any, Literal

from paxserve.loaders.tokenizer import Tokenizer

TokenSyntax = Literal["byte_level", "byte_fallback", "opaque"]
"""How a tokenizer spells bytes: every token is bytes; text with tokens such as `<0xE2>`; or in a way not known here."""

MAX_TOKEN_ID = 2**31 - 1


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, turned round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(hidden)}


class TokenTable:
    """Bytes of every token id, looked up on first use and kept; odd ids stand for nothing and never raise."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend = tokenizer.backend
        self.syntax: TokenSyntax
        self._replacements: list[tuple[str, str]] = []
        self.syntax, self._replacements = _read_decoder(self.backend.decoder)
        self._alphabet = _byte_level_alphabet() if self.syntax == "byte_level" else {}
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._raw_bytes: dict[int, int | None] = {}

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary has this id."""
        return self._token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text, markup of special tokens included."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def raw_byte(self, token_id: int) -> int | None:
        """The byte, when this is a token such as `<0xE2>` of a vocabulary that falls back to bytes."""
        if token_id not in self._raw_bytes:
            token = self._token(token_id) if self.syntax == "byte_fallback" else None
            self._raw_bytes[token_id] = None if token is None else _parse_raw_byte(token)
        return self._raw_bytes[token_id]

    def _token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None

    def _spell(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if self.syntax == "byte_level":
            if all(char in self._alphabet for char in token):
                return bytes(self._alphabet[char] for char in token)
            return token.encode()
        if self.syntax == "byte_fallback":
            byte = self.raw_byte(token_id)
            if byte is not None:
                return bytes([byte])
            for old, new in self._replacements:
                token = token.replace(old, new)
            return token.encode()
        if token_id in self.special_ids:
            return token.encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()


def _parse_raw_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _read_decoder(decoder: Any) -> tuple[TokenSyntax, list[tuple[str, str]]]:
    """The syntax of a tokenizer's decoder, with the replacements that it makes in tokens."""
    if decoder is None:
        return "opaque", []
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", []
    replacements = []
    while kinds and kinds[0] == "Replace" and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        kinds, steps = kinds[1:], steps[1:]
    # A final Strip takes the space off the very first word; output goes on after a prompt, where it belongs.
    if kinds[:2] == ["ByteFallback", "Fuse"] and (not kinds[2:] or (kinds[2:] == ["Strip"] and steps[2]["stop"] == 0)):
        return "byte_fallback", replacements
    return "opaque", []


@functools.lru_cache(maxsize=4)
def token_table(tokenizer: Tokenizer) -> TokenTable:
    """The table of this tokenizer, made once."""
    return TokenTable(tokenizer)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that one token adds to a text, also when they are only part of a character."""
    return token_table(tokenizer).token_bytes(token_id)
