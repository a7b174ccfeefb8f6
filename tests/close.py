"""The one comparison of the tests: tolerances derived from the dtype and the length of the reduction."""

import numpy as np

from rlnumba.runtime import device

# Half a unit in the last place, relative.
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def assert_close(actual, expected, dtype=None, terms=1, scale=None, what=""):
    """Fail unless |actual - expected| is what rounding explains.

    dtype: the dtype name in which values were stored (default: actual's). terms: the number of float32
    terms added up for one value; rounding errors of a sum grow about as its square root (we allow four
    times that). expected: a NumPy array, computed in float64 where rounding matters. scale: the size of
    the terms, when cancellation makes `expected` smaller than they are (default: the largest |expected|).
    """
    actual = device.to_host(actual)
    dtype = dtype or actual.dtype.name
    actual = actual.astype(np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if not actual.size:
        return
    assert not np.isnan(actual).any() or np.isnan(expected).any(), f"{what}: NaN"
    scale = float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0)) if scale is None else scale
    accumulation = "float64" if dtype == "float64" else "float32"
    allowed = scale * (2 * ROUNDING[dtype] + 4 * np.sqrt(terms) * ROUNDING[accumulation] * 4)
    difference = np.abs(np.where(actual == expected, 0.0, actual - expected))
    worst = np.unravel_index(np.argmax(difference), difference.shape)
    assert difference[worst] <= allowed, (
        f"{what}: at {tuple(map(int, worst))} got {actual[worst]!r}, expected {expected[worst]!r}, "
        f"difference {difference[worst]:.3g} > {allowed:.3g}"
    )


def assert_same_bits(actual, expected, what=""):
    """Fail unless the two arrays are equal bit for bit."""
    actual, expected = device.to_host(actual), device.to_host(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[actual.dtype.itemsize]
    differing = np.ascontiguousarray(actual).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    assert not differing.any(), f"{what}: {int(differing.sum())} of {actual.size} values differ in their bits"


def assert_gradient(function, gradient, x, what="", step=1e-6, tolerance=1e-6):
    """Fail unless `gradient` is the derivative of the scalar function at the float64 array x.

    Central differences: truncation error O(step^2), rounding error about 1e-16 / step relative to the
    function's size, so a correct gradient agrees to about 1e-9 times the size of function and derivatives.
    """
    assert x.dtype == np.float64
    numeric = np.empty_like(x)
    flat, out = x.reshape(-1), numeric.reshape(-1)
    for i in range(flat.size):
        kept = flat[i]
        flat[i] = kept + step
        above = function()
        flat[i] = kept - step
        below = function()
        flat[i] = kept
        out[i] = (above - below) / (2 * step)
    scale = max(1.0, float(np.max(np.abs(numeric), initial=0.0)))
    difference = np.max(np.abs(numeric - gradient), initial=0.0)
    assert difference <= tolerance * scale, f"{what}: gradient differs from finite differences by {difference:.3g}"
