"""Log-probabilities in the two shapes that OpenAI's endpoints have for them."""

from collections.abc import Iterable, Sequence

from paxserve.engine.token_table import token_bytes
from paxserve.entrypoints.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from paxserve.entrypoints.protocol.completions import CompletionLogprobs
from paxserve.entrypoints.protocol.generation import PromptLogprob
from paxserve.loaders.tokenizer import Tokenizer
from paxserve.outputs import Logprob

LOWEST = -9999.0
"""What JSON says instead of minus infinity."""


class LogprobWriter:
    """Writes log-probabilities for one answer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_token_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.as_token_ids = as_token_ids

    def token_text(self, token_id: int, entry: Logprob | None) -> str:
        """How a token is shown."""
        if self.as_token_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def completion(
        self, token_ids: Sequence[int], entries: Iterable[dict[int, Logprob] | None], offset: int
    ) -> CompletionLogprobs:
        """The completions' shape; `offset` is where in the text the first token begins."""
        written = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen = entry[token_id] if entry is not None else None
            text = self.token_text(token_id, chosen)
            written.text_offset.append(offset)
            written.tokens.append(text)
            written.token_logprobs.append(max(chosen.logprob, LOWEST) if chosen else None)
            written.top_logprobs.append(self._by_text(entry) if entry is not None else None)
            offset += len(text)
        return written

    def chat(self, token_ids: Sequence[int], entries: Iterable[dict[int, Logprob]], num_top: int) -> ChatLogprobs:
        """The chat's shape; `num_top` rivals at each position, -1 for all."""
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
            top = [
                TopLogprob(self.token_text(rival, value), max(value.logprob, LOWEST), self._bytes(rival))
                for rival, value in (ranked if num_top == -1 else ranked[:num_top])
            ]
            chosen = entry[token_id]
            text = self.token_text(token_id, chosen)
            content.append(TokenLogprob(text, max(chosen.logprob, LOWEST), self._bytes(token_id), top))
        return ChatLogprobs(content)

    def prompt(self, entries: Sequence[dict[int, Logprob] | None]) -> list[dict[int, PromptLogprob] | None]:
        """vLLM's shape for prompts: by token id."""
        return [
            None
            if entry is None
            else {
                token_id: PromptLogprob(max(value.logprob, LOWEST), value.rank, value.decoded_token)
                for token_id, value in entry.items()
            }
            for entry in entries
        ]

    def _by_text(self, entry: dict[int, Logprob]) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for token_id, value in entry.items():
            # Two tokens may look the same (parts of characters do): the first, likelier one stays.
            by_text.setdefault(self.token_text(token_id, value), max(value.logprob, LOWEST))
        return by_text

    def _bytes(self, token_id: int) -> list[int]:
        return list(token_bytes(self.tokenizer, token_id)) if self.tokenizer is not None else []
