"""Token ids to text as they come: whole characters only, special tokens skipped, stop strings found."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from paxserve.engine.stop_strings import StopFinder
from paxserve.engine.token_table import TokenTable
from paxserve.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """Turns visible token ids into text, holding back bytes that are only the beginning of a character."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come: a cut character becomes U+FFFD."""
        ...


class ByteLevelStream:
    """For vocabularies whose tokens are bytes: equal to decoding all ids at once, at every end."""

    def __init__(self, table: TokenTable) -> None:
        self._token_bytes = table.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """What is left when no more tokens come: a cut character becomes U+FFFD."""
        return self._decode(b"", final=True)


class ByteFallbackStream:
    """For vocabularies of text pieces that spell rare characters with tokens such as `<0xE2>`.

    As tokenizers does, each byte of a run that is not UTF-8 becomes one U+FFFD; but characters that were complete
    before the fault stay, as they have been sent by then.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._run = bytearray()
        self._is_broken = False

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        byte = self._table.raw_byte(token_id)
        if byte is None:
            text = self._table.token_bytes(token_id).decode()
            return self.flush() + text if text else ""
        if self._is_broken:
            return REPLACEMENT
        self._run.append(byte)
        try:
            text = codecs.getincrementaldecoder("utf-8")(errors="strict").decode(bytes(self._run))
        except UnicodeDecodeError:
            text = self.flush()
            self._is_broken = True
        if text:
            self._run.clear()
        return text

    def flush(self) -> str:
        """What is left when no more tokens come: a cut character becomes U+FFFD."""
        text = REPLACEMENT * len(self._run)
        self._run.clear()
        self._is_broken = False
        return text


class WindowStream:
    """For any other decoder: decodes a short window of ids again and passes on what was added."""

    MAX_WINDOW = 32
    MAX_HELD = 8
    """Tokens to wait for the rest of a character: four would do for bytes, twice that for odd vocabularies."""

    def __init__(self, table: TokenTable, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._table, self._skip = table, skip_special_tokens
        self._ids = [token_id for token_id in prompt_token_ids[-self.MAX_HELD :] if table.is_known(token_id)]
        self._sent = self._decode()
        self._num_held = 0

    def _decode(self) -> str:
        return self._table.backend.decode(self._ids, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if not self._table.is_known(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode()
        self._num_held += 1
        if text.endswith(REPLACEMENT) and self._num_held <= self.MAX_HELD:
            return ""
        return self._pass_on(text)

    def flush(self) -> str:
        """What is left when no more tokens come: a cut character becomes U+FFFD."""
        return self._pass_on(self._decode())

    def _pass_on(self, text: str) -> str:
        # Some decoders rewrite what they said (clean-up of spaces): what was sent stays, what follows is new.
        added = text[len(self._sent) :]
        self._num_held = 0
        if len(self._ids) > self.MAX_WINDOW:
            self._ids = self._ids[-self.MAX_HELD :]
            text = self._decode()
        self._sent = text
        return added


def open_stream(table: TokenTable, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> TextStream:
    """The stream that fits the tokenizer's way of spelling bytes."""
    if table.syntax == "byte_level":
        return ByteLevelStream(table)
    if table.syntax == "byte_fallback":
        return ByteFallbackStream(table)
    return WindowStream(table, prompt_token_ids, skip_special_tokens)


class IncrementalDetokenizer:
    """The text of one output. Joined, the pieces that `take` returns are the decoded output, whatever the steps.

    Text that may be the beginning of a stop string is held back until that is decided.
    `spaces_between_special_tokens` needs nothing here: these tokenizers never put spaces there.
    """

    def __init__(self, table: TokenTable, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._hidden_ids = table.special_ids if params.skip_special_tokens else frozenset()
        self._stream = open_stream(table, prompt_token_ids, params.skip_special_tokens)
        self._finder = StopFinder(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._pieces: list[str] = []
        self.num_tokens = 0
        self.stop_string: str | None = None
        """The stop string that ended the output."""

    def append(self, token_ids: Sequence[int], *, is_last_hidden: bool = False) -> int:
        """Take in new tokens; how many of them belong to the output: all, or up to one that completed a stop string.

        `is_last_hidden`: the last one is the stop token that ended the output and is not to be read.
        """
        num_visible = len(token_ids) - is_last_hidden
        for count, token_id in enumerate(token_ids[:num_visible], start=1):
            self.num_tokens += 1
            if token_id in self._hidden_ids:
                continue
            text = self._stream.push(token_id)
            if not text:
                continue
            if self._finder is None:
                self._pieces.append(text)
            elif self._found_stop(self._finder, text):
                return count
        self.num_tokens += is_last_hidden
        return len(token_ids)

    def _found_stop(self, finder: StopFinder, text: str) -> bool:
        passed, match = finder.feed(text, is_armed=self.num_tokens > self._min_tokens)
        if match is not None:
            passed = finder.held[: match.end if self._keep_stop else match.start]
            self.stop_string = match.stop
        self._pieces.append(passed)
        return match is not None

    def finish(self) -> None:
        """Release what was held back: the output has ended without a stop string."""
        if self._finder is not None:
            self._pieces.append(self._finder.flush())
        self._pieces.append(self._stream.flush())

    def take(self) -> str:
        """The text that has become certain since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text
