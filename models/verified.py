"""What was checked of each family: the table in `verified.toml`, which the tests compare with what they run."""

import dataclasses
import importlib.resources
import tomllib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verified:
    """The checks of one family."""

    goldens: tuple[str, ...] = ()
    """Tiny checkpoints whose log-probabilities and greedy tokens equal those of transformers."""
    pooling: tuple[str, ...] = ()
    """Tiny checkpoints whose states or class logits do."""
    sizes: tuple[str, ...] = ()
    """Public configurations whose parameters and cache bytes are the published ones."""
    real: tuple[str, ...] = ()
    """Real weights that give the reference's answers."""

    def as_dict(self) -> dict[str, Any]:
        """The fields that hold something, as lists."""
        return {name: list(names) for name, names in dataclasses.asdict(self).items() if names}


def read_verified() -> dict[str, Verified]:
    """The table, by family."""
    text = (importlib.resources.files("models") / "verified.toml").read_text(encoding="utf-8")
    return {
        name: Verified(**{key: tuple(names) for key, names in entry.items()})
        for name, entry in tomllib.loads(text).items()
    }
