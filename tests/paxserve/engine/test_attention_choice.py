"""Which attention an engine on TPU gets."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.inputs import CacheSpec
from pallas_kernels.ragged_paged_attention.tpu_tuning import INTERPRETED, Chip
from paxserve.config import EngineConfig
from paxserve.engine import attention_choice
from paxserve.engine.attention_choice import kernel_refusal, settle_attention
from paxserve.errors import ConfigError
from paxserve.platform import PLATFORMS, resolve

LLAMA = json.loads((Path(__file__).parents[2] / "models" / "configs" / "llama-3.1-8b.json").read_text())
MODEL = SimpleNamespace(
    cache_spec=CacheSpec(num_layers=32, num_kv_heads=8, head_dim=128),
    config=SimpleNamespace(**{k: v for k, v in LLAMA.items() if k.startswith("num_")}),
)
V6E = Chip(vmem_bytes=128 << 20, smem_bytes=1 << 20, bytes_per_second=1.64e12, num_cores=1)


def resolved(**flags):
    return resolve(EngineConfig.from_flags(model="llama", dtype="bfloat16", **flags), PLATFORMS["tpu"])


@pytest.fixture(autouse=True)
def chip(monkeypatch):
    monkeypatch.setattr(attention_choice, "Chip", SimpleNamespace(current=lambda: V6E))


@pytest.mark.parametrize(
    ("flags", "max_model_len", "page_size"),
    [({}, 8192, 64), ({}, 131072, 256), ({"kv_cache_dtype": "int8"}, 8192, 64), ({"block_size": 16}, 8192, 16)],
)
def test_auto_is_the_kernels_in_the_smallest_pages_that_they_take(flags, max_model_len, page_size):
    config = settle_attention(resolved(**flags), MODEL, max_model_len, was_auto=True)
    assert (config.compile.attention_backend, config.cache.block_size) == ("tpu", page_size)


@pytest.mark.parametrize(
    ("flags", "max_model_len", "reason"),
    [
        ({"block_size": 16}, 131072, "page size 256 would fit"),
        ({"block_size": 16, "kv_cache_dtype": "int8"}, 8192, "page_size must be a multiple of 32 for int8 pages"),
    ],
)
def test_a_page_size_that_the_kernels_refuse(flags, max_model_len, reason, caplog):
    with caplog.at_level(logging.WARNING):
        config = settle_attention(resolved(**flags), MODEL, max_model_len, was_auto=True)
    assert (config.compile.attention_backend, config.cache.block_size) == ("xla", 16)
    assert "FALLS BACK" in caplog.text
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=f"attention_backend=tpu cannot run this model: .*{reason}"):
        settle_attention(resolved(attention_backend="tpu", **flags), MODEL, max_model_len, was_auto=False)


def test_pages_of_other_backends():
    config = settle_attention(resolved(attention_backend="xla"), MODEL, 8192, was_auto=False)
    assert config.cache.block_size == 16
    assert resolve(EngineConfig.from_flags(model="llama"), PLATFORMS["cpu"]).cache.block_size == 16


def test_refusals_name_their_reason():
    assert kernel_refusal(resolved(block_size=256), MODEL, 131072, V6E) is None
    assert "multiple of 16" in (kernel_refusal(resolved(block_size=24), MODEL, 8192, V6E) or "")
    many_heads = SimpleNamespace(
        cache_spec=CacheSpec(num_layers=2, num_kv_heads=64, head_dim=256),
        config=SimpleNamespace(num_attention_heads=64, num_key_value_heads=64),
    )
    assert "VMEM" in (kernel_refusal(resolved(block_size=128), many_heads, 8192, INTERPRETED) or "")
