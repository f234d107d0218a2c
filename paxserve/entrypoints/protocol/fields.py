"""Fields that paxserve knows by name without offering what they ask for: refused by name, never ignored."""

from collections.abc import Mapping
from typing import Any

from paxserve.errors import RequestError

HARMLESS = frozenset({
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
    "session_id",
})  # fmt: skip
"""Fields of OpenAI's clients that change no answer: who asks, how it is billed, how it may be sped up."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "return_weight_versions": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "lora_request": (),
    "lora_name": (),
    "lora_path": (),
    "max_new_tokens": (),
    "typical_p": (1,),
    "logit_processors": (),
    "logits_processors": ([],),
    "moderation": (),
}
"""Fields that paxserve does not support (yet), with the values besides null that ask for nothing."""

REASONS = {
    "best_of": "it was removed; use n",
    "guided_json": 'it was removed; use structured_outputs={"json": ...} where the server offers that',
    "guided_regex": 'it was removed; use structured_outputs={"regex": ...} where the server offers that',
    "guided_choice": 'it was removed; use structured_outputs={"choice": ...} where the server offers that',
    "guided_grammar": 'it was removed; use structured_outputs={"grammar": ...} where the server offers that',
    "guided_decoding_backend": "it was removed; the server chooses",
    "guided_whitespace_pattern": 'it was removed; use structured_outputs={"whitespace_pattern": ...}',
    "prompt_embeds": "tensors are not taken from clients; send text or token ids",
    "media_io_kwargs": "this is a text model",
    "mm_processor_kwargs": "this is a text model",
    "audio": "this is a text model",
    "modalities": "this is a text model",
    "max_new_tokens": "its name is max_tokens",
    "typical_p": "no such sampling is offered",
    "logit_processors": "code is not taken from clients",
    "logits_processors": "code is not taken from clients",
    "suffix": "only models for filling in the middle have it",
    "include_reasoning": "no reasoning parser is configured",
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
}


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Raise `RequestError` for a field that would change the answer if it were understood."""
    for name, value in (extra or {}).items():
        if name in HARMLESS or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
            continue
        shown = name[:64]
        if name in NEUTRAL:
            reason = f": {REASONS[name]}" if name in REASONS else " by this server"
            raise RequestError(f"{shown} is not supported{reason}. Leave it out.", shown)
        raise RequestError(f"{shown!r} is no field of this endpoint. Leave it out or correct its name.", shown)
