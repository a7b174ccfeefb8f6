"""The one way an operator refuses an array: before any launch, naming operator, argument and expectation."""

import numpy as np

from rlnumba import device

FLOATS = tuple(device.DTYPES.values())
F32 = (device.DTYPES["float32"],)
I32 = (np.dtype(np.int32),)


def check(op, name, array, shape, dtypes):
    """Return array.shape if `array` is C-contiguous with this shape and one of these dtypes.

    shape: a tuple of int, or None where any length will do. dtypes: a tuple of NumPy dtypes.
    Raises ValueError such as "rmsnorm: out must be (4, 8) float32, got (4, 7) float32".
    """
    actual = array.shape
    fits = len(actual) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, actual, strict=True)
    )
    if fits and array.dtype in dtypes and array.flags.c_contiguous:
        return actual
    wanted = "(" + ", ".join("any" if want is None else str(want) for want in shape) + ")"
    kinds = " or ".join(str(dtype) for dtype in dtypes)
    layout = "" if array.flags.c_contiguous else ", not C-contiguous"
    raise ValueError(f"{op}: {name} must be {wanted} {kinds}, got {tuple(actual)} {array.dtype}{layout}")
