"""paxserve: LLM inference and serving in JAX for TPUs, GPUs and CPUs.

`LLM` and `SamplingParams` are the offline API; the `paxserve` command serves over HTTP. Modules here are the
nouns that both share: configuration, errors, requests, messages, outputs.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paxserve.beam_search_params import BeamSearchParams
    from paxserve.config import EngineConfig
    from paxserve.errors import ConfigError, EngineDeadError, PaxserveError, RequestError
    from paxserve.llm import LLM
    from paxserve.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from paxserve.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from paxserve.pooling_params import PoolingParams
    from paxserve.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "Logprob",
    "PaxserveError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "__version__",
]

# Loaded on first use: `paxserve --help` and the HTTP client commands must not wait for jax.
_HOMES = {
    "LLM": "paxserve.llm",
    "SamplingParams": "paxserve.sampling_params",
    "BeamSearchParams": "paxserve.beam_search_params",
    "PoolingParams": "paxserve.pooling_params",
    "EngineConfig": "paxserve.config",
    **dict.fromkeys(("ConfigError", "EngineDeadError", "PaxserveError", "RequestError"), "paxserve.errors"),
    **dict.fromkeys(
        ("BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
        "paxserve.outputs",
    ),
    **dict.fromkeys(
        ("ClassificationRequestOutput", "EmbeddingRequestOutput", "PoolingRequestOutput", "ScoringRequestOutput"),
        "paxserve.pooling_outputs",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _check_siblings(home: Path) -> None:
    """Refuse to start when another project's top-level package shadows one of ours."""
    for name in ("models", "pallas_kernels", "sharding"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if found != home:
            raise ImportError(
                f"paxserve is in {home}, but its package {name!r} is found in {found or 'no folder'}. "
                "Install paxserve in a virtual environment of its own."
            )


_check_siblings(Path(__file__).resolve().parent.parent)
