"""What the engine does differently on CPU, GPU and TPU: the defaults that the user's `None` and "auto" stand for."""

import dataclasses
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from paxserve.config import CompileConfig, EngineConfig, ParallelConfig, cache_root
from paxserve.errors import ConfigError
from sharding.mesh import make_mesh

CPU_XLA_FLAGS = ("--xla_cpu_prefer_vector_width=512",)
"""Measured in docs/performance.md; they act only on XLA:CPU."""

CPU_KV_POOL_BYTES = int(1.1 * 2**30)
"""Default KV pool on CPU, where the memory is shared with everything else on the machine."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """The defaults of one kind of device."""

    kind: str
    """"cpu", "gpu" or "tpu"."""
    attention_backend: str
    expert_backend: str
    layer_execution: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    """0 where it depends on the model: see `attention_choice`."""

    def dtype(self, wanted: str, checkpoint_dtype: str) -> str:
        """The weights' type: float32 on CPU unless asked otherwise, because bfloat16 matmuls are slow there."""
        wanted = {"half": "float16", "float": "float32"}.get(wanted, wanted)
        if wanted != "auto":
            return wanted
        return "float32" if self.kind == "cpu" else checkpoint_dtype


PLATFORMS = {
    "cpu": Platform(
        kind="cpu",
        attention_backend="xla",
        expert_backend="cpu",
        layer_execution="looped",
        max_num_seqs=64,
        max_num_batched_tokens=512,
    ),
    "gpu": Platform(
        kind="gpu",
        attention_backend="xla",
        expert_backend="ragged",
        layer_execution="scanned",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    ),
    "tpu": Platform(
        kind="tpu",
        attention_backend="tpu",
        expert_backend="tpu",
        layer_execution="scanned",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        block_size=0,
    ),
}


def configure_jax(config: CompileConfig) -> Path | None:
    """Set XLA's flags before anything touches a device; returns the folder to keep compiled programs in, if any."""
    leave_out_absent_tpu()
    present = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in CPU_XLA_FLAGS if flag.split("=")[0] not in present]
    os.environ["XLA_FLAGS"] = " ".join([present, *missing]).strip()
    folder = config.compilation_cache_dir
    if folder is None:
        folder = str(cache_root() / "compiled")
    if not folder:
        return None
    # Not both caches: a program that XLA:CPU loaded from jax's cannot be written again; it then lacks its functions.
    jax.config.update("jax_enable_compilation_cache", False)
    return Path(folder)


def leave_out_absent_tpu() -> None:
    """Keep jax from trying libtpu, which says that it failed, where it is installed (for `plan`) without a TPU.

    jax itself looks for a TPU's chips when it is imported, and sets this variable where there are none.
    """
    has_plugins = importlib.util.find_spec("jax_plugins") is not None
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1" and jax.config.values["jax_platforms"] is None and not has_plugins:
        jax.config.update("jax_platforms", "cpu")


def detect_platform() -> Platform:
    """The platform of jax's default backend."""
    backend = jax.default_backend()
    return PLATFORMS["gpu" if backend in ("gpu", "cuda", "rocm") else backend]


def resolve(config: EngineConfig, platform: Platform) -> EngineConfig:
    """The configuration with the platform's defaults in place of what was left open."""
    scheduler, compile_ = config.scheduler, config.compile
    max_num_seqs = scheduler.max_num_seqs or platform.max_num_seqs
    budget = scheduler.max_num_batched_tokens or max(platform.max_num_batched_tokens, max_num_seqs)
    open_names = ("attention_backend", "expert_backend", "layer_execution")
    chosen = {name: getattr(platform, name) for name in open_names if getattr(compile_, name) == "auto"}
    return dataclasses.replace(
        config,
        cache=dataclasses.replace(config.cache, block_size=config.cache.block_size or platform.block_size),
        scheduler=dataclasses.replace(scheduler, max_num_seqs=min(max_num_seqs, budget), max_num_batched_tokens=budget),
        compile=dataclasses.replace(compile_, **chosen),
    )


def device_mesh(config: ParallelConfig, platform: Platform) -> Mesh | None:
    """The devices that the model is spread over; None is the first one alone, for which nothing is annotated.

    Raises `ConfigError` when there are too few.
    """
    size, devices = config.tensor_parallel_size, jax.devices()
    if size > len(devices):
        hint = "." if platform.kind != "cpu" else (
            f"; XLA_FLAGS=--xla_force_host_platform_device_count={size} in the environment simulates {size} on a CPU."
        )  # fmt: skip
        raise ConfigError(
            f"tensor_parallel_size={size} takes {size} devices, there are {len(devices)} of kind "
            f"{devices[0].device_kind}: use a size from 1 to {len(devices)}{hint}"
        )
    return None if size == 1 else make_mesh(devices, tensor=size)


def kv_pool_bytes(config: EngineConfig, platform: Platform) -> int:
    """Bytes the KV pool may take on each device, now that the weights are loaded."""
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes
    num_devices = config.parallel.tensor_parallel_size
    if platform.kind == "cpu":
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(CPU_KV_POOL_BYTES, available // 2) // num_devices

    def free(device: Any) -> int:
        stats = device.memory_stats() or {}
        limit, in_use = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        return int(limit * config.cache.gpu_memory_utilization) - in_use

    return min(free(device) for device in jax.local_devices()[:num_devices])
