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
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "stream_interval": (1,),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
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
}
"""Fields that paxserve does not support (yet), with the values besides null that ask for nothing."""

REASONS = {
    "best_of": "it was removed from the API; use n",
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
