"""How many pages an engine has, on the device and in host memory, how large they are, and which layers share one."""

import hashlib
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from models.inputs import CacheSpec
from models.layer_groups import LayerGroups
from pallas_kernels.ragged_paged_attention import pool_bytes_per_page
from paxserve.config import EngineConfig
from paxserve.engine.disk_folder import DiskFolder
from paxserve.engine.disk_tier import DiskTier
from paxserve.engine.host_tier import HostTier
from paxserve.engine.kv_cache import PagePool
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import Checkpoint
from paxserve.platform import Platform, kv_pool_bytes

logger = logging.getLogger(__name__)

FETCHED_BYTES = 2**27
"""Most that is read from disk for one request before it starts: what it needs beyond that is computed."""


def group_layers(config: EngineConfig, spec: CacheSpec, max_model_len: int) -> LayerGroups:
    """The groups of layers that have page tables of their own."""
    if config.cache.disable_hybrid_kv_cache_manager or not spec.reaches:
        return LayerGroups.whole(spec.num_layers)
    return LayerGroups.arrange(spec.reaches, max_model_len)


def page_bytes(config: EngineConfig, spec: CacheSpec, max_model_len: int, backend: str | None = None) -> int:
    """Bytes of a page on all devices together; `ConfigError` where the attention backend has no such pages."""
    try:
        return pool_bytes_per_page(
            backend or config.compile.attention_backend, num_layers=group_layers(config, spec, max_model_len).size,
            page_size=config.cache.block_size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            dtype=jnp.dtype(config.kv_dtype), is_latent=spec.is_latent,
        )  # fmt: skip
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"kv_cache_dtype={config.cache.kv_cache_dtype}, block_size={config.cache.block_size}: {error}"
        ) from error


def make_page_pool(
    config: EngineConfig, platform: Platform, checkpoint: Checkpoint, spec: CacheSpec, max_model_len: int
) -> PagePool:
    """The engine's pages, none of them held."""
    cache = config.cache
    return PagePool(
        count_pages(config, spec, max_model_len, partial(kv_pool_bytes, config, platform)),
        cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        host=_host_tier(config, spec, max_model_len),
        disk=_disk_tier(config, checkpoint, spec, max_model_len),
        reaches=group_layers(config, spec, max_model_len).reaches,
    )


def _host_tier(config: EngineConfig, spec: CacheSpec, max_model_len: int) -> HostTier | None:
    """The tier of the prefix cache in host memory, if there is to be one."""
    size = int(config.cache.kv_offloading_size * 2**30)
    if not size:
        return None
    # In host memory pages have no padding, as the reference backend's have none.
    own = page_bytes(config, spec, max_model_len, "reference")
    if size < own:
        raise ConfigError(f"kv_offloading_size must be at least a page of {own / 2**30:.6f} GiB.")
    return HostTier(size // own)


def _disk_tier(config: EngineConfig, checkpoint: Checkpoint, spec: CacheSpec, max_model_len: int) -> DiskTier | None:
    """The tier on disk, if there is to be one."""
    path = config.cache.kv_offloading_disk_path
    if path is None:
        return None
    own = page_bytes(config, spec, max_model_len, "reference")
    most = int(config.cache.kv_offloading_disk_size * 2**30)
    if most < 2 * own:
        raise ConfigError(f"kv_offloading_disk_size must have room for two pages of {own / 2**30:.6f} GiB.")
    groups = group_layers(config, spec, max_model_len)
    fingerprint = kv_fingerprint(config, checkpoint, spec, groups, max_model_len)
    folder = DiskFolder(Path(path).expanduser(), most, fingerprint)
    logger.info("%d pages of this model are in %s", len(folder), path)
    return DiskTier(folder, most_fetched=max(groups.num_groups, FETCHED_BYTES // own))


def kv_fingerprint(
    config: EngineConfig, checkpoint: Checkpoint, spec: CacheSpec, groups: LayerGroups, max_model_len: int
) -> str:
    """A name for all that a page's bytes depend on besides its tokens: weights, types, shapes, lengths.

    Weights are known by their files: names, sizes and times.
    """
    path = checkpoint.path
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    facts = {
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "configuration": checkpoint.hf_config,
        "random weights": config.model.seed if config.model.load_format == "dummy" else None,
        "types": [config.model.dtype, config.kv_dtype],
        "shapes": [spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.is_latent, config.cache.block_size],
        "groups": [groups.group_of, groups.index_of, groups.size],
        "max_model_len": max_model_len,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def count_pages(config: EngineConfig, spec: CacheSpec, max_model_len: int, bytes_allowed: Callable[[], int]) -> int:
    """Pages of the KV pool; `ConfigError` if no sequence finds place in the bytes that it is allowed on each device."""
    cache = config.cache
    if spec.page_divides is not None and spec.page_divides % cache.block_size:
        raise ConfigError(
            f"block_size={cache.block_size} is not supported: this model attends in chunks of {spec.page_divides} "
            "tokens, which must be a whole number of pages."
        )
    # Kv heads are spread evenly; latents, which all query heads read, are on every device.
    num_devices = 1 if spec.is_latent else config.parallel.tensor_parallel_size
    if spec.num_kv_heads % num_devices:
        raise ConfigError(
            f"tensor_parallel_size={num_devices} is not supported for this model: what it caches for a token has "
            f"{spec.num_kv_heads} parts, which cannot be spread. Use 1."
        )
    groups = group_layers(config, spec, max_model_len)
    own_bytes = page_bytes(config, spec, max_model_len) // num_devices
    if cache.num_gpu_blocks_override is not None:
        if cache.num_gpu_blocks_override < groups.num_groups:
            raise ConfigError(
                f"num_gpu_blocks_override must be at least {groups.num_groups} for this model, a page for each group "
                f"of its layers, got {cache.num_gpu_blocks_override}."
            )
        return cache.num_gpu_blocks_override
    pool_bytes = bytes_allowed()
    max_num_seqs, budget = config.scheduler.limits
    # No more pages than all sequences at their full length could use.
    useful = max_num_seqs * groups.pages_for(max_model_len, cache.block_size, budget)
    count = min(pool_bytes // own_bytes, useful)
    if count < groups.num_groups:
        raise ConfigError(
            f"The KV pool gets {pool_bytes:,} bytes, less than one page of {own_bytes:,}"
            f"{f' for each of {groups.num_groups} groups of layers' if groups.num_groups > 1 else ''}: raise "
            "kv_cache_memory_bytes or gpu_memory_utilization, or lower block_size."
        )
    return count
