"""Model families: one module a family, named by the checkpoint's `model_type`, on the blocks in `models.layers`.

A family module exports `Config` (with `Config.from_hf`), `Model` (see `models.layers.causal_lm`) and `load_map`
(see `models.layers.weight_map`). The file's name is its registration.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

NOT_FAMILIES = {"inputs", "layer_groups", "layers", "verified"}

__all__ = ["architectures", "find_architecture", "named_architecture"]


def architectures() -> list[str]:
    """The `model_type`s that can be run, found without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in NOT_FAMILIES)


def find_architecture(hf_config: Mapping[str, Any]) -> ModuleType:
    """The family's module for a checkpoint's configuration; `ValueError` names the closest one that exists."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError("config.json has no model_type: it is not a checkpoint of the transformers library.")
    return importlib.import_module(f"{__name__}.{named_architecture(model_type)}")


def named_architecture(model_type: str) -> str:
    """The name of a `model_type`'s module; `ValueError` names the closest one if there is none."""
    name = model_type.replace("-", "_")
    known = architectures()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        hint = f" The closest one is {close[0]}." if close else ""
        raise ValueError(f"model_type {model_type!r} is not supported: expected one of {', '.join(known)}.{hint}")
    return name
