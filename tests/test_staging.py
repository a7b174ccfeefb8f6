"""Arrays that reach the device, and come back, in one copy."""

import numpy as np
import pytest

from rlnumba.runtime import device
from rlnumba.runtime.staging import Staged
from tests.close import assert_same_bits

LAYOUT = {"ids": ((5,), np.dtype(np.int32)), "empty": ((0,), np.dtype(np.float32)), "x": ((3, 2), np.dtype(np.float32))}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, 9, 5).astype(np.int32),
        "empty": np.empty(0, np.float32),
        "x": rng.standard_normal((3, 2), np.float32),
    }


def test_arrays_have_their_shapes_dtypes_and_alignment():
    staged = Staged(LAYOUT)
    staged.send(arrays(0))
    for name, expected in arrays(0).items():
        assert_same_bits(staged.arrays[name], expected, name)
        assert staged.offsets[name] % 4 == 0
    # At the same addresses.
    before = staged.arrays["x"]
    staged.send(arrays(1))
    assert_same_bits(before, arrays(1)["x"])


def test_what_was_read_is_what_there_was_then():
    staged = Staged(LAYOUT)
    staged.send(arrays(0))
    first = staged.read()
    staged.send(arrays(1))
    second = staged.read()
    for seed, read in ((0, first), (1, second)):
        for name, expected in arrays(seed).items():
            assert_same_bits(read()[name], expected, name)


@pytest.mark.gpu
def test_many_copies_under_way_keep_their_memory():
    """Page-locked memory is not given to the next copy before the one that uses it is done."""
    staged, reads, rng = Staged({"x": ((1 << 20,), np.dtype(np.float32))}), [], np.random.default_rng(0)
    values = rng.standard_normal(64).astype(np.float32)
    busy = device.xp().ones((4096, 4096), np.float32)
    for value in values:
        busy @= busy * np.float32(1e-4)
        staged.send({"x": np.full(1 << 20, value)})
        reads.append(staged.read())
    for value, read in zip(values, reads, strict=True):
        assert (read()["x"] == value).all()
