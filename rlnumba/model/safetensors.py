"""The safetensors file format, read and written a tensor at a time.

    8 bytes   header length n, little-endian uint64
    n bytes   JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    the rest  the tensors' bytes, C order, little-endian, without gaps

Source: github.com/huggingface/safetensors, "Format". Reading maps the file and writing takes the arrays one by
one, so that neither holds a second copy of a model; every way in which a file can be damaged is named.
"""

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from rlnumba.errors import UserError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The format's own limit: a longer header is not a header.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: dtype as the header names it, shape, first byte and end in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A safetensors file, mapped: `entries` by name, `metadata`, and `file[name]` a read-only NumPy array.

    The whole layout is checked when the file is opened. Raises UserError naming the file and what is wrong.
    """

    def __init__(self, path):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise UserError(f"{self.path}: damaged safetensors file: {size} bytes, too short for a header")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
        length = int.from_bytes(self._bytes[:8], "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise UserError(
                f"{self.path}: damaged safetensors file: a header of {length} bytes in a file of {size} bytes"
            )
        try:
            header = json.loads(self._bytes[8 : 8 + length])
            self.metadata = header.pop("__metadata__", {})
            self.entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.path}: damaged safetensors header ({error})") from None
        for name, entry in self.entries.items():
            itemsize = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
            if entry.end > size:
                raise UserError(
                    f"{self.path}: truncated: tensor {name} ends at byte {entry.end}, the file has {size} bytes"
                )
            if entry.begin < 8 + length or (
                itemsize is not None and entry.end - entry.begin != math.prod(entry.shape) * itemsize
            ):
                raise UserError(
                    f"{self.path}: damaged safetensors header: offsets of tensor {name} do not fit its shape"
                )

    def __getitem__(self, name):
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise UserError(f"{self.path}: tensor {name} has dtype {entry.dtype} (supported: {', '.join(DTYPES)})")
        dtype = DTYPES[entry.dtype]
        array = np.frombuffer(self._bytes, dtype, math.prod(entry.shape), entry.begin)
        return array.reshape(entry.shape)


def _entry(value, data):
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)) or end < begin:
        raise ValueError(f"shape {shape}, offsets {begin} to {end}")
    return Entry(str(value["dtype"]), shape, data + begin, data + end)


def write(path, tensors, metadata=None):
    """Write a safetensors file under a temporary name, flush it to the disk, and rename it into place.

    tensors: list of (name, dtype, shape, make), where make() gives the NumPy array when its turn comes; larger
    element types go first, so that every tensor is aligned to its element. metadata: dict of str, or None.
    """
    tensors = sorted(tensors, key=lambda tensor: -np.dtype(tensor[1]).itemsize)
    header = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape, _ in tensors:
        end = offset + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape, make in tensors:
            array = np.asarray(make(), dtype=dtype, order="C")
            if array.shape != tuple(shape):
                raise ValueError(f"safetensors: {name} must be {tuple(shape)}, got {array.shape}")
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
