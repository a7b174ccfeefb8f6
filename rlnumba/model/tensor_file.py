"""safetensors files, written and read a piece at a time.

    8 bytes: length of the header | header: JSON | values of the tensors, one after the other

The bytes are those that the safetensors library writes: tensors in the order of their dtypes, then of their names. The
library writes a file at once, from whole tensors in the memory of one process. Here a file is created with its header
and its whole size, and pieces of its tensors are written in place, in any order and by any process.
"""

import functools
import json
import math
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from rlnumba.data.pointers import unfetched
from rlnumba.errors import UserError
from rlnumba.runtime import device

# The library refuses longer headers.
MOST_HEADER_BYTES = 100_000_000
# Bytes of a tensor that are on the host at one time.
PIECE_BYTES = 8 << 20

# {dtype: its name in a header}, in the order in which the library writes tensors.
_NAMES = {
    np.dtype(kind): name
    for kind, name in (
        (np.uint64, "U64"), (np.int64, "I64"), (np.float64, "F64"), (np.complex64, "C64"), (np.float32, "F32"),
        (np.uint32, "U32"), (np.int32, "I32"), (ml_dtypes.bfloat16, "BF16"), (np.float16, "F16"), (np.uint16, "U16"),
        (np.int16, "I16"), (ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int8, "I8"), (np.uint8, "U8"), (np.bool_, "BOOL"),
    )
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file: its header, and read(), which returns its values in a new array.

    begin, end: where its bytes begin and end in the file.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    begin: int
    end: int

    def values_in(self, mapped):
        """The tensor's values in the mapped bytes of the file, which are not copied."""
        return mapped[self.begin : self.end].view(_DTYPES[self.dtype]).reshape(self.shape)

    def values_of(self, contents):
        """The same, of the mapped bytes of all files: {path: (n,) uint8}."""
        return self.values_in(contents[self.path])

    @property
    def paths(self):
        """The files that its bytes lie in: a set."""
        return {self.path}

    def write(self, descriptor, values, first=0):
        """Write elements first, first + 1, ... of the tensor, from an array of NumPy or of the device, converted.

        descriptor: that of the open file. At most PIECE_BYTES are copied at a time.
        """
        values, dtype = values.reshape(-1), _DTYPES[self.dtype]
        length = PIECE_BYTES // dtype.itemsize
        for start in range(0, len(values), length):
            piece = np.ascontiguousarray(device.to_host(values[start : start + length]), dtype).view(np.uint8)
            at = self.begin + (first + start) * dtype.itemsize
            while len(piece):
                count = os.pwrite(descriptor, piece, at)
                piece, at = piece[count:], at + count


def open_tensors(path):
    """{name: Stored} of a safetensors file, which stays mapped while one of them is referenced.

    Raises UserError naming the file and what is wrong with it, as the library finds its layout and length.
    """
    path = Path(path)
    try:
        # safe_open reports every file that cannot be opened as missing, and checks the header.
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            content = file.read(min(size, MOST_HEADER_BYTES))
        file = safe_open(path, framework="numpy")
        headers, found = json.loads(content), {}
        for name in file.keys():
            header = file.get_slice(name)
            read = functools.partial(file.get_tensor, name)
            span = (8 + size + offset for offset in headers[name]["data_offsets"])
            found[name] = Stored(path, tuple(header.get_shape()), header.get_dtype(), read, *span)
        return found
    except SafetensorError as error:
        damaged = f"{path}: truncated or damaged safetensors file ({_one_line(error)})"
        raise UserError(unfetched(path) or damaged) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or _one_line(error)}") from None


def read_arrays(path):
    """{name: array} of a safetensors file, mapped: a page is read when it is first needed, and copied when written to.

    Raises UserError as open_tensors.
    """
    found = open_tensors(path)
    mapped = np.memmap(path, np.uint8, "c").view(np.ndarray)
    return {name: stored.values_in(mapped) for name, stored in found.items()}


def create_tensors(path, tensors, metadata=None):
    """Create a safetensors file of {name: (shape, dtype)} with zeros for values, which take no room on the disk yet.

    metadata: dict of str, or None. Raises UserError naming the file for a dtype that such files do not have.
    """
    header, size = _header(path, tensors, metadata)
    _create(path, header, size)


def write_tensors(path, arrays, metadata=None, dtype=None):
    """Write {name: array} as a safetensors file under a temporary name, flush it, and rename it into place.

    arrays: NumPy's or the device's; a piece at a time is copied to the host. metadata: dict of str, or None. dtype:
    that of all tensors, by default each has its array's. Raises UserError naming the file if it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    header, size = _header(path, {name: (each.shape, dtype or each.dtype) for name, each in arrays.items()}, metadata)
    try:
        partial.unlink(missing_ok=True)
        _create(partial, header, size)
        stored = open_tensors(partial)
        with open_to_write(partial) as descriptor:
            for name, array in arrays.items():
                stored[name].write(descriptor, array)
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        raise


def _header(path, tensors, metadata):
    """(header, bytes of the whole file) of {name: (shape, dtype)}."""
    header = {} if metadata is None else {"__metadata__": metadata}
    kinds, end = list(_NAMES), 0
    dtypes = {name: np.dtype(dtype).newbyteorder("=") for name, (_, dtype) in tensors.items()}
    for name, dtype in dtypes.items():
        if dtype not in _NAMES:
            supported = ", ".join(kind.name for kind in kinds)
            raise UserError(f"{path}: cannot be written (tensor {name} has dtype {dtype}; supported: {supported})")
    for name in sorted(tensors, key=lambda name: (kinds.index(dtypes[name]), name.encode())):
        shape, begin = tensors[name][0], end
        end += math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [begin, end]}
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content, 8 + len(content) + end


def _create(path, header, size):
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(size)


@contextmanager
def open_to_write(path):
    """The descriptor of a file that is there, to write in place; what was written is on the disk at the end."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _one_line(error):
    return " ".join(str(error).split())
