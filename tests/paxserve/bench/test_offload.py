from pathlib import Path

import pytest

from paxserve.bench.offload import measure_offload
from paxserve.errors import ConfigError

FLAGS = {
    "model": str(Path(__file__).parents[2] / "goldens" / "llama"), "max_model_len": 128, "num_gpu_blocks_override": 40,
    "compile_sizes": [8], "max_num_batched_tokens": 32, "block_size": 4, "kv_offloading_size": 0.01,
}  # fmt: skip


def test_all_four_are_measured(tmp_path):
    result = measure_offload(FLAGS | {"kv_offloading_disk_path": str(tmp_path)}, prompt_len=101, rounds=1)
    assert min(result[f"{place}_ms"] for place in ("recompute", "host", "disk", "device")) > 0
    assert result["disk_to_device"] == pytest.approx(result["disk_ms"] / result["device_ms"], rel=0.02)
    assert len(list(tmp_path.glob("*/*.page"))) > 0


def test_too_little_room_is_said(tmp_path):
    flags = FLAGS | {"kv_offloading_disk_path": str(tmp_path), "kv_offloading_disk_size": 0.0001}
    with pytest.raises(ConfigError, match="tokens were found again"):
        measure_offload(flags, prompt_len=101, rounds=1)
