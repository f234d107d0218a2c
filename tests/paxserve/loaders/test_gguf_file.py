import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paxserve.errors import ConfigError
from paxserve.loaders.gguf_checkpoint import GgufCheckpoint
from paxserve.loaders.gguf_file import GgufFile
from tests.paxserve.loaders.tiny_checkpoints import TOKENS, write_llama_gguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_llama_gguf(tmp_path / "tiny.gguf")


def test_metadata_equals_what_the_gguf_package_reads(tmp_path):
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_bool("t.yes", True)
        writer.add_int8("t.i8", -3)
        writer.add_uint64("t.u64", 2**60)
        writer.add_float64("t.f64", 0.1)
        writer.add_array("t.ints", [1, -2, 3])
        writer.add_array("t.floats", [0.5, 1.5])
        writer.add_array("t.texts", ["", "é", "two words"])
        writer.add_custom_alignment(64)

    path = write_llama_gguf(tmp_path / "m.gguf", edit=edit)
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    file = GgufFile(path)
    assert file.metadata == expected
    assert [t.name for t in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors:
        np.testing.assert_array_equal(file.read(tensor.name), tensor.data)


READABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType[name] for name in READABLE], ids=READABLE)
@pytest.mark.parametrize("shape", [(64,), (7, 96), (2048, 64), (3, 5, 32)], ids=str)
def test_dequantised_as_the_gguf_package_does(tmp_path, kind, shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    stored = gguf.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("t", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = GgufFile(tmp_path / "q.gguf").read("t")
    assert result.shape == shape
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, gguf.dequantize(stored, kind))


def test_bad_magic(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ConfigError, match=r"m\.gguf is no GGUF file: it starts with b'PK"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("content", [b"", b"GG"])
def test_too_short(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match="is no GGUF file"):
        GgufFile(tmp_path / "m.gguf")


def test_old_version(tiny):
    whole = bytearray(tiny.read_bytes())
    whole[4:8] = struct.pack("<I", 1)
    tiny.write_bytes(whole)
    with pytest.raises(ConfigError, match="has GGUF version 1"):
        GgufFile(tiny)


def test_truncated_tensor_data(tiny):
    whole = tiny.read_bytes()
    tiny.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"tiny\.gguf is truncated: tensor [\w.]+ ends at byte \d+, the file has \d+"):
        GgufFile(tiny)


def header_length(path: Path) -> int:
    return min(tensor.start for tensor in GgufFile(path).tensors.values())


def test_a_cut_of_the_header_is_a_clear_error(tiny):
    whole = tiny.read_bytes()
    for length in range(0, header_length(tiny), 11):
        tiny.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"tiny\.gguf"):
            GgufFile(tiny)


def patch_kind(path: Path, number: int) -> None:
    """Give the first tensor another type: its name is followed by dimensions, shape, type and offset."""
    whole = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    at = whole.rindex(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 2 * 8
    whole[at : at + 4] = struct.pack("<I", number)
    path.write_bytes(whole)


@pytest.mark.parametrize(("number", "label"), [(999, "number 999"), (int(gguf.GGMLQuantizationType.Q8_K), "Q8_K")])
def test_unreadable_tensor_type(tiny, number, label):
    patch_kind(tiny, number)
    with pytest.raises(ConfigError, match=rf"tensor token_embd\.weight has type {label}, which .* cannot dequantise"):
        GgufFile(tiny)


def test_row_that_does_not_divide_into_blocks(tiny):
    patch_kind(tiny, int(gguf.GGMLQuantizationType.Q4_K))
    with pytest.raises(ConfigError, match="does not divide into Q4_K blocks"):
        GgufFile(tiny)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_header_never_raises_anything_else(tiny, position, value):
    whole = bytearray(tiny.read_bytes())
    whole[position % header_length(tiny)] = value
    damaged = tiny.with_name("damaged.gguf")
    damaged.write_bytes(whole)
    try:
        checkpoint = GgufCheckpoint(damaged)
        tokenizer = checkpoint.load_tokenizer()
    except ConfigError:
        return
    assert tokenizer.vocab_size >= len(TOKENS) - 1
