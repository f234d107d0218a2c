"""Which implementation of paged attention an engine on TPU gets: the kernels, or xla where they cannot do the model."""

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import tpu_tuning
from pallas_kernels.ragged_paged_attention.tpu_tuning import Chip
from paxserve.config import EngineConfig

logger = logging.getLogger(__name__)


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


def settle_backend(config: EngineConfig, model: Any, max_model_len: int, *, was_auto: bool) -> EngineConfig:
    """The configuration with xla in place of kernels that refuse, if nobody asked for them by name."""
    if not was_auto or config.compile.attention_backend != "tpu":
        return config
    reason = kernel_refusal(config, model, max_model_len, Chip.current())
    if reason is None:
        return config
    logger.warning("ATTENTION FALLS BACK from the TPU kernels to xla, which is much slower: %s", reason)
    return dataclasses.replace(config, compile=dataclasses.replace(config.compile, attention_backend="xla"))
