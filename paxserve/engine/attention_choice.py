"""Which implementation of paged attention an engine on TPU gets, and in pages of how many tokens.

It is the kernels, or xla where they cannot do the model.
"""

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import tpu_tuning
from pallas_kernels.ragged_paged_attention.tpu_tuning import Chip
from paxserve.config import EngineConfig
from paxserve.errors import ConfigError

logger = logging.getLogger(__name__)

PAGE_SIZES = (64, 128, 256, 512, 1024)
"""Tokens of a page tried for the kernels, fewest first, when nobody has named a number."""

XLA_PAGE_SIZE = 16


def kernel_refusal(config: EngineConfig, model: Any, max_model_len: int, chip: Chip) -> str | None:
    """Why the TPU kernels cannot serve this model with this resolved configuration; None when they can."""
    spec, shards = model.cache_spec, config.parallel.tensor_parallel_size
    num_slots, budget = config.scheduler.limits
    page_size = config.cache.block_size
    num_kv_heads = -(-spec.num_kv_heads // shards)
    num_groups = -(-model.config.num_attention_heads // model.config.num_key_value_heads)
    if spec.is_latent:  # every device has all latents, and its own query heads
        num_groups = -(-model.config.num_attention_heads // shards)
    shape = tpu_tuning.Shape(
        num_tokens=budget, num_rows=num_slots, num_heads=num_kv_heads * num_groups, num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim, page_size=page_size, table_width=-(-max_model_len // page_size),
        pool_dtype=jnp.dtype(config.kv_dtype), is_latent=spec.is_latent,
    )  # fmt: skip
    try:
        tpu_tuning.choose(shape, chip)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


def settle_attention(config: EngineConfig, model: Any, max_model_len: int, *, was_auto: bool) -> EngineConfig:
    """The configuration with a page size, and xla in place of kernels that refuse, if nobody asked for them by name.

    Raises `ConfigError` where the kernels were asked for by name and take no page size.
    """
    if config.compile.attention_backend != "tpu":
        return _with_page_size(config, config.cache.block_size or XLA_PAGE_SIZE)
    chip = Chip.current()
    reason = None
    for size in PAGE_SIZES if config.cache.block_size == 0 else (config.cache.block_size,):
        sized = _with_page_size(config, size)
        refusal = kernel_refusal(sized, model, max_model_len, chip)
        if refusal is None:
            return sized
        reason = reason or refusal
    if not was_auto:
        raise ConfigError(f"attention_backend=tpu cannot run this model: {reason}")
    logger.warning("ATTENTION FALLS BACK from the TPU kernels to xla, which is much slower: %s", reason)
    config = _with_page_size(config, config.cache.block_size or XLA_PAGE_SIZE)
    return dataclasses.replace(config, compile=dataclasses.replace(config.compile, attention_backend="xla"))


def _with_page_size(config: EngineConfig, size: int) -> EngineConfig:
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, block_size=size))
