import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paxserve.errors import ConfigError
from paxserve.loaders.safetensors_file import SafetensorsFile
from paxserve.loaders.tensor_spec import TensorSpec


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    save_file(
        {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.ones((5,), np.int8)}, tmp_path / "g.safetensors"
    )
    return tmp_path / "g.safetensors"


def test_reads_what_the_safetensors_library_wrote(good):
    file = SafetensorsFile(good)
    assert file.tensors["x"] == TensorSpec((3, 4), np.dtype(np.float32))
    np.testing.assert_array_equal(file.read("x"), np.arange(12, dtype=np.float32).reshape(3, 4))
    np.testing.assert_array_equal(file.read("y"), np.ones((5,), np.int8))
    assert not file.read("x").flags.writeable


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BF16", ml_dtypes.bfloat16),
        ("F16", np.float16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F64", np.float64),
        ("BOOL", np.bool_),
    ],
)
def test_reads_every_type(tmp_path, name, dtype):
    values = np.array([[0, 1, 0.5], [1, 2, 0]]).astype(dtype)
    entry = {"dtype": name, "shape": [2, 3], "data_offsets": [0, values.nbytes]}
    file = SafetensorsFile(write_raw(tmp_path / "t.safetensors", {"t": entry}, values.tobytes()))
    assert file.read("t").dtype == np.dtype(dtype)
    np.testing.assert_array_equal(file.read("t").astype(np.float64), values.astype(np.float64))


def test_empty_and_scalar_tensors(tmp_path):
    header = {
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [4, 4]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    file = SafetensorsFile(write_raw(tmp_path / "t.safetensors", header, np.float32(7).tobytes()))
    assert file.read("empty").shape == (0, 3)
    assert file.read("scalar") == 7


def test_truncated_data_names_file_and_tensor(good):
    good.write_bytes(good.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"g\.safetensors is truncated: tensor \w ends at byte \d+, the file has \d+"):
        SafetensorsFile(good)


def test_every_cut_is_a_clear_error(good):
    whole = good.read_bytes()
    for length in range(len(whole)):
        good.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"g\.safetensors"):
            SafetensorsFile(good)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "unreadable safetensors header"),
        ([1], "unreadable safetensors header"),
        ({"t": {"dtype": "F32"}}, "unreadable safetensors header"),
        ({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "unreadable safetensors header"),
        ({"t": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, "tensor t has type Q9, which is not supported"),
        (
            {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            r"tensor t is F32 \[2\] but spans bytes 0 to 4",
        ),
        ({"t": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "spans bytes"),
    ],
)
def test_bad_headers(tmp_path, header, message):
    with pytest.raises(ConfigError, match=message):
        SafetensorsFile(write_raw(tmp_path / "bad.safetensors", header, b"\0" * 4))


def test_git_lfs_pointer(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        SafetensorsFile(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_byte_never_raises_anything_else(good, position, value):
    whole = bytearray(good.read_bytes())
    whole[position % len(whole)] = value
    damaged = good.with_name("damaged.safetensors")
    damaged.write_bytes(whole)
    try:
        file = SafetensorsFile(damaged)
    except ConfigError:
        return
    for name, spec in file.tensors.items():
        assert file.read(name).shape == spec.shape
