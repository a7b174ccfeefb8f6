import numpy as np
import pytest

from rlnumba.kernels.nn.lora import keep_blocks, keep_blocks_ref, scale_adapters, scale_adapters_ref
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits

# Rows, columns of an adapter, adapters: one; below and above a warp's columns and a block's rows; none; a real one.
SMALL = [(1, 16, 1), (9, 48, 1), (8, 16, 3), (0, 16, 2), (3, 1, 1)]


def run_scale(rng, rows, columns, adapters, dtype, with_ids=True):
    x = rng.standard_normal((rows, columns * adapters), np.float32).astype(device.dtype(dtype))
    scales = rng.uniform(0.5, 2, adapters).astype(np.float32)
    ids = rng.integers(-1, adapters, rows).astype(np.int32) if with_ids else None
    out = device.xp().full(x.shape, np.nan, x.dtype)
    scale_adapters(device.asarray(x), device.asarray(scales), None if ids is None else device.asarray(ids), out)
    expected = np.zeros(x.shape)
    for row in range(rows):
        adapter = ids[row] if with_ids else 0
        if adapter >= 0:
            own = slice(adapter * columns, (adapter + 1) * columns)
            expected[row, own] = x[row, own].astype(np.float64) * scales[adapter]
    assert_close(out, expected, dtype)
    if dtype == "float32":
        assert_same_bits(out, scale_adapters_ref(x, scales, ids))


def run_blocks(rng, repeats, period, columns, width):
    matrix = rng.standard_normal((repeats * period, columns), np.float32)
    first = np.sort(rng.integers(0, columns + 1, period)).astype(np.int32)
    expected = matrix.copy()
    for row, line in enumerate(expected):
        line[: first[row % period]] = 0
        line[first[row % period] + width :] = 0
    assert_same_bits(keep_blocks_ref(first, width, matrix), expected)
    out = device.asarray(matrix)
    keep_blocks(device.asarray(first), width, out)
    assert_same_bits(out, expected)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in SMALL:
        run_scale(rng, *shape, dtype)
    run_scale(rng, 9, 48, 1, dtype, with_ids=False)


@pytest.mark.sim
@pytest.mark.parametrize(
    "repeats, period, columns, width", [(1, 1, 16, 4), (3, 5, 48, 16), (2, 9, 33, 11), (0, 3, 4, 2)]
)
def test_blocks_in_the_simulator(rng, repeats, period, columns, width):
    run_blocks(rng, repeats, period, columns, width)


def test_numpy_device(rng):
    if device.name() == "cpu":
        for shape in [*SMALL, (1000, 32, 2)]:
            run_scale(rng, *shape, "float32")
            run_blocks(rng, 3, 50, 48, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu(rng, dtype):
    run_scale(rng, 4097, 64, 3, dtype)
    run_scale(rng, 4097, 48, 1, dtype, with_ids=False)
    run_blocks(rng, 4, 6144, 48, 16)


def test_a_row_without_an_adapter_has_no_nan(rng):
    """What other rows' adapters give is not multiplied by 0, but left out."""
    x = device.asarray(np.full((2, 4), np.inf, np.float32))
    out = device.xp().empty((2, 4), np.float32)
    scale_adapters(x, device.asarray(np.float32([1, 2])), device.asarray(np.int32([-1, 1])), out)
    assert_same_bits(out, np.float32([[0, 0, 0, 0], [0, 0, np.inf, np.inf]]))


@pytest.mark.sim
def test_a_row_without_an_adapter_has_no_nan_in_kernels(rng):
    test_a_row_without_an_adapter_has_no_nan(rng)


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, scales = xp.zeros((2, 6), np.float32), xp.ones(4, np.float32)
    with pytest.raises(ValueError, match="scale_adapters: x must have columns for each of 4 adapters, got 6"):
        scale_adapters(x, scales, None, x)
    with pytest.raises(ValueError, match=r"scale_adapters: adapter_ids must be \(2\) int32"):
        scale_adapters(x, scales[:2], xp.zeros(3, np.int32), x)
    with pytest.raises(ValueError, match="keep_blocks: matrix must have a multiple of 3 rows, got 2"):
        keep_blocks(xp.zeros(3, np.int32), 2, x)
