"""The answers of /v1/models and /version."""

import msgspec


class ModelPermission(msgspec.Struct):
    """What may be done with a model, as OpenAI's clients expect to read it."""

    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct):
    """One name under which a model is served."""

    id: str
    created: int
    root: str
    max_model_len: int
    permission: list[ModelPermission]
    object: str = "model"
    owned_by: str = "paxserve"
    parent: None = None


class ModelList(msgspec.Struct):
    """All names that the server knows."""

    data: list[ModelCard]
    object: str = "list"
