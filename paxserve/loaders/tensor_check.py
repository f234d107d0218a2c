"""Whether a checkpoint has the tensors that a model wants: all faults at once, before any tensor is read."""

import difflib
import re
from collections.abc import Mapping, Set

import jax.numpy as jnp

from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import Checkpoint

NOT_WEIGHTS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn(ention)?\.(masked_)?bias$|\.position_ids$"
)
MAX_NAMES_SHOWN = 8


def check_tensors(
    checkpoint: Checkpoint,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    known: Set[str] = frozenset(),
    unused: tuple[str, ...] = (),
) -> None:
    """Raise one `ConfigError` naming what is missing, unexpected, of the wrong shape or not of a float type.

    `wanted` are the shapes by name. `known` names, and names that begin with one of `unused`, may be there too.
    """
    stored = checkpoint.tensors
    missing = [name for name in wanted if name not in stored]
    unexpected = [
        name
        for name in stored
        if not (name in wanted or name in known or NOT_WEIGHTS.search(name) or name.startswith(unused))
    ]
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing ({_some(missing)})")
        close = difflib.get_close_matches(missing[0], unexpected, n=1)
        if close:
            faults[-1] += f"; {close[0]} is there instead of {missing[0]}"
    if unexpected:
        faults.append(f"{len(unexpected)} unexpected ({_some(unexpected)})")
    wrong = [
        f"{name} should be {list(shape)}, is {list(stored[name].shape)}"
        for name, shape in wanted.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    wrong += [
        f"{name} should be of a float type, is {stored[name].dtype}"
        for name in wanted
        if name in stored and not jnp.issubdtype(stored[name].dtype, jnp.floating)
    ]
    if wrong:
        faults.append(f"{len(wrong)} of the wrong form ({_some(wrong, '; ')})")
    if faults:
        raise ConfigError(f"The tensors of {checkpoint.name} do not fit its configuration: {'; '.join(faults)}.")


def _some(names: list[str], separator: str = ", ") -> str:
    more = [f"and {len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    return separator.join(names[:MAX_NAMES_SHOWN] + more)
