"""What every engine core does when it starts: timing its phases, settling lengths and types, watching compilations."""

import logging
import threading
import time
import weakref
from typing import Any

import jax
import jax.monitoring

from paxserve.config import cache_root
from paxserve.errors import ConfigError

logger = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class PhaseClock:
    """Seconds between the ends of the phases of the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """Note how long the phase that ends now has taken."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


class CompilationCounter:
    """Counts compilations by a thread that has entered it: around the steps of a ready engine there are none."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        # jax keeps listeners for ever: it must not keep the engine.
        this = weakref.ref(self)

        def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
            counter = this()
            if event == COMPILE_EVENT and counter is not None:
                counter.add(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)

    def add(self, seconds: float) -> None:
        """Count a compilation, unless it is a background thread or another engine that compiles."""
        if self._thread == threading.get_ident():
            self.count += 1
            logger.warning("A program was compiled while serving (%.1f s): this is a bug in paxserve", seconds)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None


def checkpoint_dtype(hf_config: dict[str, Any]) -> str:
    """The type the checkpoint was made in; transformers 5 says `dtype`, older ones `torch_dtype`."""
    return str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")


def settle_max_model_len(wanted: int | None, trained: int) -> int:
    """The longest sequence: what was wanted, else what the model was trained for. `ConfigError` if it is too much."""
    if wanted is not None and wanted > trained:
        raise ConfigError(
            f"max_model_len={wanted} is more than the model's max_position_embeddings={trained}: positions beyond it "
            "were never trained."
        )
    return wanted or trained


class Profiling:
    """The two calls of an engine core that trace what it does."""

    _is_profiling = False

    def start_profile(self) -> bool:
        """Begin a trace of the device and of this process under the cache folder; False if there is one."""
        if self._is_profiling:
            return False
        jax.profiler.start_trace(str(cache_root() / "profiles"))
        self._is_profiling = True
        return True

    def stop_profile(self) -> bool:
        """End the trace and write it; False if there is none."""
        if not self._is_profiling:
            return False
        jax.profiler.stop_trace()
        self._is_profiling = False
        return True
