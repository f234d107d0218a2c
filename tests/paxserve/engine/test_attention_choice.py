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
from paxserve.engine.attention_choice import kernel_refusal, settle_backend
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


def test_auto_is_the_kernels_where_they_can():
    config = resolved()
    assert config.compile.attention_backend == "tpu"
    assert settle_backend(config, MODEL, 8192, was_auto=True) is config


def test_a_page_table_too_large_falls_back_and_says_what_would_do(caplog):
    with caplog.at_level(logging.WARNING):
        config = settle_backend(resolved(), MODEL, 131072, was_auto=True)
    assert config.compile.attention_backend == "xla"
    assert "FALLS BACK" in caplog.text
    assert "page size 256 would fit" in caplog.text


def test_what_was_asked_for_by_name_stays():
    config = resolved(attention_backend="tpu")
    assert settle_backend(config, MODEL, 131072, was_auto=False) is config


def test_refusals_name_their_reason():
    assert kernel_refusal(resolved(block_size=256), MODEL, 131072, V6E) is None
    assert "multiple of 16" in (kernel_refusal(resolved(block_size=24), MODEL, 8192, V6E) or "")
    many_heads = SimpleNamespace(
        cache_spec=CacheSpec(num_layers=2, num_kv_heads=64, head_dim=256),
        config=SimpleNamespace(num_attention_heads=64, num_key_value_heads=64),
    )
    assert "VMEM" in (kernel_refusal(resolved(block_size=128), many_heads, 8192, INTERPRETED) or "")
