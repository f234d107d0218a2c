"""The fields that ask for beam search, and those that have no meaning beside it: refused by name."""

from typing import Any, Literal

from pydantic import BaseModel, StrictBool

from paxserve.beam_search_params import BeamSearchParams
from paxserve.errors import RequestError

SAMPLING_FIELDS = (
    "n",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)
"""Fields of `SamplingParams` that a search heeds."""

MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ("", []),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "repetition_detection": (),
    "prompt_logprobs": (),
}
"""Fields that a search cannot heed, with the values besides null that ask for nothing."""


class BeamSearchFields(BaseModel):
    """Beam search in vLLM's words, and transformers' `early_stopping`: `n` is the number of beams."""

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: StrictBool | Literal["never"] | None = None

    def beam_search(self) -> BeamSearchParams | None:
        """The search that this body asks for, if it does; its length and its ends are in the sampling parameters.

        Raises `RequestError` for fields that do not go together.
        """
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise RequestError(f"{name} needs use_beam_search to be true.", name)
            return None
        for name, neutral in MEANINGLESS.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise RequestError(f"{name} cannot be combined with use_beam_search. Leave it out.", name)
        values = {
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "temperature": getattr(self, "temperature", None),
        }
        given = {name: value for name, value in values.items() if value is not None}
        return BeamSearchParams(beam_width=getattr(self, "n", None) or 1, max_tokens=None, **given)
