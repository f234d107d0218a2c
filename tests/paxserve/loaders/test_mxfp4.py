import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import gpt_oss
from paxserve.config import ModelConfig
from paxserve.errors import ConfigError
from paxserve.loaders.checkpoint import open_checkpoint
from paxserve.loaders.mxfp4 import dequantize
from paxserve.loaders.weights import choose_architecture, load_model
from tests.engine_driver import GOLDENS


def by_the_standard(code: int) -> float:
    """E2M1, from its definition: sign, two bits of exponent with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = -1 if code & 8 else 1, (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2))


def test_every_code_and_scale():
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scales = np.array([[0, 1, 100, 120, 126, 127, 128, 130, 140, 160, 200, 250, 251, 90, 80, 70]], np.uint8)
    out = dequantize(blocks, scales).astype(np.float64).reshape(16, 16, 2)
    for block in range(16):
        for byte in range(16):
            code = 16 * block + byte
            expected = np.array([by_the_standard(code & 15), by_the_standard(code >> 4)])
            np.testing.assert_array_equal(out[block, byte], expected * 2.0 ** (int(scales[0, block]) - 127))


@pytest.fixture
def folder(tmp_path):
    """The golden gpt-oss with experts of random MXFP4 numbers; their true values are in `whole`."""
    rng = np.random.default_rng(0)
    arrays = load_file(GOLDENS / "gpt_oss" / "model.safetensors")
    config = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 96}
    whole = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, out_size, in_size in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            codes = rng.integers(0, 16, (4, out_size, in_size))
            scales = rng.integers(118, 124, (4, out_size, in_size // 32)).astype(np.uint8)
            numbers = np.vectorize(by_the_standard)(codes) * 2.0 ** (np.repeat(scales, 32, axis=-1).astype(int) - 127)
            whole[prefix + name] = np.ascontiguousarray(numbers.swapaxes(1, 2)).astype(np.float32)
            del arrays[prefix + name]
            packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
            arrays[f"{prefix}{name}_blocks"] = packed.reshape(4, out_size, in_size // 32, 16)
            arrays[f"{prefix}{name}_scales"] = scales
        arrays[prefix + "gate_up_proj_bias"] = arrays[prefix + "gate_up_proj_bias"][:, :192].copy()
    for kind, tensors in (("packed", arrays), ("whole", arrays | whole)):
        (tmp_path / kind).mkdir()
        tensors = {n: t for n, t in tensors.items() if kind == "packed" or not n.endswith(("_blocks", "_scales"))}
        save_file(tensors, tmp_path / kind / "model.safetensors")
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
    return tmp_path


def load(path):
    checkpoint = open_checkpoint(ModelConfig(model=str(path)))
    return load_model(*choose_architecture(checkpoint), checkpoint, dtype=jnp.float32)


def test_packed_experts_equal_whole_ones(folder):
    packed, whole = (load(folder / kind) for kind in ("packed", "whole"))
    for layer, expected in zip(packed.layers, whole.layers, strict=True):
        for name in ("gate", "up", "down"):
            matrices, wanted = (getattr(one.mlp.experts, name).get_value() for one in (layer, expected))
            np.testing.assert_array_equal(matrices, wanted)
            assert np.abs(matrices).max() > 0


def test_scales_that_do_not_fit_are_refused(folder):
    path = folder / "packed" / "model.safetensors"
    arrays = load_file(path)
    name = "model.layers.2.mlp.experts.down_proj"
    arrays[f"{name}_scales"] = arrays[f"{name}_scales"][:, :-1].copy()
    save_file(arrays, path)
    with pytest.raises(ConfigError, match=rf"{name}_blocks must be bytes .* with {name}_scales of as many blocks"):
        load(folder / "packed")


def test_other_quantizations_are_refused():
    config = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    with pytest.raises(ValueError, match="quant_method 'awq'"):
        gpt_oss.Config.from_hf(config | {"quantization_config": {"quant_method": "awq"}})
