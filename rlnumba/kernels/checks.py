"""Checks of operators' arrays: before any launch, with an error that names operator, argument and expectation."""

import functools

import numpy as np

from rlnumba.runtime import device

FLOATS = tuple(device.DTYPES.values())
F32 = (device.DTYPES["float32"],)
I32 = (np.dtype(np.int32),)
# Bytes of the smallest asynchronous copy, and the alignment it needs.
CHUNK = 16


@functools.cache
def _array_type():
    return device.xp().ndarray


def check(op, name, array, shape, dtypes):
    """Return array.shape if `array` is an array of the device, C-contiguous, with this shape and one of these dtypes.

    shape: a tuple of int, or None where any length will do. dtypes: a tuple of NumPy dtypes.
    Raises ValueError such as "rmsnorm: out must be (4, 8) float32, got (4, 7) float32".
    """
    if not isinstance(array, _array_type()):
        wanted, got = (f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in (_array_type(), type(array)))
        raise ValueError(f"{op}: {name} must be an array of device {device.name()}, {wanted}, got {got}")
    actual = array.shape
    # Hundreds of times in a step; most shapes have no None, and are compared at once.
    fits = actual == shape or (
        len(actual) == len(shape) and all(want in (None, have) for want, have in zip(shape, actual, strict=True))
    )
    if fits and array.dtype in dtypes and array.flags.c_contiguous:
        return actual
    wanted = "(" + ", ".join("any" if want is None else str(want) for want in shape) + ")"
    kinds = " or ".join(str(dtype) for dtype in dtypes)
    layout = "" if array.flags.c_contiguous else ", not C-contiguous"
    raise ValueError(f"{op}: {name} must be {wanted} {kinds}, got {tuple(actual)} {array.dtype}{layout}")


@functools.cache
def unused(dimensions=1, dtype=np.int32):
    """An array without elements that stands for an argument of a kernel that is left out."""
    return device.xp().zeros((0,) * dimensions, dtype)


def check_all(op, shape, dtypes, **arrays):
    """check of several arrays of one shape."""
    for name, array in arrays.items():
        check(op, name, array, shape, dtypes)


def check_bounds(op, name, array):
    """Number of sequences in an int32 array of bounds such as cu_seqlens: its length less 1, or ValueError."""
    (count,) = check(op, name, array, (None,), I32)
    if not count:
        raise ValueError(f"{op}: {name} must have at least one element, got none")
    return count - 1


def address(array):
    """The address of an array of the device, in bytes."""
    return array.data.ptr if device.name() == "cuda" else array.ctypes.data


def is_16_byte_aligned(*matrices):
    """Whether all matrices, and each of their rows, begin at multiples of CHUNK bytes."""
    return all(matrix.shape[-1] * matrix.itemsize % CHUNK == 0 and address(matrix) % CHUNK == 0 for matrix in matrices)


def check_chunks(op, **arrays):
    """Raise ValueError naming the first array that does not begin at a multiple of CHUNK bytes."""
    for name, array in arrays.items():
        if address(array) % CHUNK:
            raise ValueError(f"{op}: {name} must begin at a multiple of {CHUNK} bytes, got address {address(array):#x}")
