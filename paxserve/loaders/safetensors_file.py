"""One safetensors file: its header checked against the file's size, its tensors as views of the mapped file."""

import json
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from paxserve.errors import ConfigError
from paxserve.loaders.tensor_spec import TensorSpec

MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
LFS_POINTER = b"version https://git-lfs"
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class SafetensorsFile:
    """The tensors of one .safetensors file; opening it reads the header only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = file.seek(0, 2)
                file.seek(0)
                header_bytes = self._read_header(file.read(8), file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
        self._data_start = 8 + len(header_bytes)
        self._offsets: dict[str, int] = {}
        self.tensors: Mapping[str, TensorSpec] = self._parse(header_bytes)

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as a read-only view of the mapped file: no memory of its own."""
        shape, dtype = self.tensors[name]
        return np.ndarray(shape, dtype, self._map, self._data_start + self._offsets[name])

    def _read_header(self, prefix: bytes, file: BinaryIO) -> bytes:
        if len(prefix) < 8:
            raise ConfigError(f"{self.path} is truncated: it has {self._size} bytes, too few for safetensors.")
        (length,) = struct.unpack("<Q", prefix)
        if LFS_POINTER.startswith(prefix):
            raise ConfigError(f"{self.path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder.")
        if length > min(MAX_HEADER_BYTES, self._size - 8):
            raise ConfigError(
                f"{self.path} is truncated or no safetensors file: its header should have {length} bytes, "
                f"the whole file has {self._size}."
            )
        return file.read(length)

    def _parse(self, header_bytes: bytes) -> dict[str, TensorSpec]:
        try:
            header = json.loads(header_bytes)
            header.pop("__metadata__", None)
            entries = []
            for name, entry in header.items():
                start, end = map(int, entry["data_offsets"])
                entries.append((name, str(entry["dtype"]), tuple(map(int, entry["shape"])), start, end))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self.path} has an unreadable safetensors header: {error!r}.") from error
        specs = {}
        for name, dtype_name, shape, start, end in entries:
            if dtype_name not in DTYPES:
                raise ConfigError(f"{self.path}: tensor {name} has type {dtype_name}, which is not supported.")
            spec = TensorSpec(shape, DTYPES[dtype_name])
            if (
                not 0 <= start <= end
                or end - start != math.prod(shape) * spec.dtype.itemsize
                or min(shape, default=1) < 0
            ):
                raise ConfigError(
                    f"{self.path}: tensor {name} is {dtype_name} {list(shape)} but spans bytes {start} to {end}."
                )
            if self._data_start + end > self._size:
                raise ConfigError(
                    f"{self.path} is truncated: tensor {name} ends at byte {self._data_start + end}, "
                    f"the file has {self._size}."
                )
            specs[name] = spec
            self._offsets[name] = start
        return specs
