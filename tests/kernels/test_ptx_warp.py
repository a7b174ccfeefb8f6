"""The instructions that kernels are made of, against NumPy: in the simulator the twins, on a GPU the hardware."""

import numpy as np
import pytest

from rlnumba.kernels.ptx.warp import access_length, exp2, inverse_sqrt, match, reciprocal, vector_access
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize
from tests.close import assert_same_bits

THREADS = 32
# dtype, elements a thread, elements moved at once
ACCESSES = [
    ("float32", 4, 4),
    ("float32", 4, 1),
    ("float16", 8, 8),
    ("bfloat16", 8, 8),
    ("bfloat16", 8, 2),
    ("float16", 8, 1),
]


@specialize
def widen_and_narrow_kernel(count, access, bounded):
    load, store = vector_access(count, access, bounded)
    twice = 2 * count

    @cuda.jit
    def widen_and_narrow_kernel(x, wide, narrow, kept):
        """A thread copies `count` elements of a row: wide = x, narrow = x of wide's type, kept = narrow widened."""
        row, first = cuda.blockIdx.x, cuda.threadIdx.x * count
        values = cuda.local.array(twice, np.float32)
        load(x[row], first, values, count)
        store(wide[row], first, values, count)
        store(narrow[row], first, values, count)
        store(kept[row], first, values, count)

    return widen_and_narrow_kernel


@specialize
def copy_bits_kernel(element, count):
    load, store = vector_access(count, count)

    @cuda.jit
    def copy_bits_kernel(x, out):
        first = cuda.threadIdx.x * count
        kept = cuda.local.array(count, element)
        load(x, first, kept, 0)
        store(out, first, kept, 0)

    return copy_bits_kernel


@cuda.jit
def approximate_kernel(x, power, inverse, inverse_root):
    i = cuda.grid(1)
    power[i] = exp2(x[i])
    inverse[i] = reciprocal(x[i])
    inverse_root[i] = inverse_sqrt(abs(x[i]))


@cuda.jit
def match_kernel(x, masks):
    i = cuda.grid(1)
    masks[i] = match(x[i])


def values_of(rng, size):
    """Normal values, and among them halves between neighbours of both 16-bit types, and what has no finite rounding."""
    x = rng.standard_normal(size, np.float32)
    x[::3] = (x[::3].view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)
    x[1::3] = (x[1::3].view(np.uint32) & np.uint32(0xFFFFE000) | np.uint32(0x1000)).view(np.float32)
    x[:8] = np.inf, -np.inf, -0.0, 65519.0, 65520.0, 3.4e38, 1e-7, -6e-8
    return x


@pytest.mark.sim
@pytest.mark.parametrize("dtype, vector, access", ACCESSES)
def test_vector_access(rng, dtype, vector, access):
    """Rows that end within a vector and, where accesses are wide, rows that fill all."""
    xp, kind = device.xp(), device.dtype(dtype)
    partial, full = 5 * vector + access, THREADS * vector
    for columns in (partial, full) if access == vector else (partial,):
        x = values_of(rng, 2 * columns).reshape(2, columns)
        wide, kept = (xp.full(x.shape, np.nan, np.float32) for _ in range(2))
        narrow = xp.full(x.shape, np.nan, kind)
        kernel = widen_and_narrow_kernel(vector, access, columns < full)
        launch(kernel, 2, THREADS, device.asarray(x), wide, narrow, kept)
        with np.errstate(over="ignore"):
            rounded = x.astype(kind)
        assert_same_bits(wide, x, "wide")
        assert_same_bits(narrow, rounded, "narrow")
        assert_same_bits(kept, rounded.astype(np.float32), "kept")
        launch(kernel, 2, THREADS, narrow, wide, narrow, kept)
        assert_same_bits(wide, rounded.astype(np.float32), "widened")


@pytest.mark.sim
@pytest.mark.parametrize("element, count", [(np.uint32, 4), (np.uint16, 8), (np.uint16, 1)])
def test_integers_keep_their_bits(rng, element, count):
    x = device.asarray(rng.integers(0, np.iinfo(element).max, count * THREADS, element))
    out = device.xp().zeros_like(x)
    launch(copy_bits_kernel(element, count), 1, THREADS, x, out)
    assert_same_bits(out, x)


@pytest.mark.sim
def test_approximations(rng):
    x = rng.uniform(-100, 100, 4 * THREADS).astype(np.float32)
    x[:4] = -np.inf, np.inf, 130.0, -150.0
    power, inverse, inverse_root = (device.xp().empty(x.size, np.float32) for _ in range(3))
    launch(approximate_kernel, 4, THREADS, device.asarray(x), power, inverse, inverse_root)
    with np.errstate(over="ignore"):
        expected = np.exp2(x.astype(np.float64)).astype(np.float32)
    expected[expected < np.finfo(np.float32).tiny] = 0
    unit = 2.0**-23
    np.testing.assert_allclose(device.to_host(power)[:4], [0, np.inf, np.inf, 0])
    np.testing.assert_allclose(device.to_host(power), expected, rtol=4 * unit, atol=1e-37)
    np.testing.assert_allclose(device.to_host(inverse), 1 / x.astype(np.float64), rtol=2 * unit)
    np.testing.assert_allclose(device.to_host(inverse_root), np.abs(x.astype(np.float64)) ** -0.5, rtol=2 * unit)


@pytest.mark.sim
def test_match(rng):
    x = rng.integers(-2, 3, 2 * THREADS).astype(np.int32)
    masks = device.xp().zeros(x.size, np.int32)
    launch(match_kernel, 2, THREADS, device.asarray(x), masks)
    alike = x.reshape(2, 1, THREADS) == x.reshape(2, THREADS, 1)
    expected = (alike << np.arange(THREADS, dtype=np.int64)).sum(axis=2).astype(np.uint32).view(np.int32)
    assert np.array_equal(device.to_host(masks), expected.reshape(-1))


def test_access_length():
    memory = device.xp().zeros(64, np.float16)
    start = -(memory.data.ptr if device.name() == "cuda" else memory.ctypes.data) % 16 // 2
    aligned = memory[start:]
    assert access_length(1024, aligned) == 8
    assert access_length(1002, aligned) == 2
    assert access_length(1001, aligned) == 1
    assert access_length(1024, aligned, aligned[4:]) == 4
    assert access_length(1024, aligned[1:], aligned) == 1
    assert access_length(1024, aligned, device.xp().zeros(8, np.float32)) == 4


@pytest.mark.sim
def test_simulator_refuses_what_the_hardware_would():
    if device.name() != "sim":
        pytest.skip("hardware reports nothing, or a misaligned address")
    x = np.zeros((2, 24), np.float32)
    with pytest.raises(IndexError, match="4 elements from 24 on, of 24"):
        launch(widen_and_narrow_kernel(4, 4, False), 1, 7, x, x, x, x)
    x = np.zeros((2, 26), np.float32)
    with pytest.raises(IndexError, match="element 0 is not at a multiple of 4"):
        launch(widen_and_narrow_kernel(4, 4, True), 2, 1, x, x, x, x)
