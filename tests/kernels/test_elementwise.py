import numpy as np
import pytest

from rlnumba.kernels.nn.elementwise import (
    add,
    cast,
    elementwise_kernel,
    fill,
    gather_rows,
    gather_rows_ref,
    scale,
    scatter_rows,
    scatter_rows_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits

# One; whole vectors and some left; a block of 16 bits filled; none; three axes.
SMALL = [(1,), (3, 85), (8192,), (0, 4), (2, 3, 4)]
REAL = [(4096, 1024), (4097, 1001), (0, 1024), (3_000_001,)]


def run_arithmetic(rng, shape, dtype):
    kind = device.dtype(dtype)
    x, y = (rng.standard_normal(shape, np.float32).astype(kind) for _ in range(2))
    xd, yd = device.asarray(x.copy()), device.asarray(y)
    out = device.xp().full(shape, np.nan, kind)
    add(xd, yd, out)
    assert_close(out, x.astype(np.float64) + y.astype(np.float64), what="add")
    add(xd, yd, xd)
    assert_same_bits(xd, out, "add in place")
    scale(yd, 0.3, out)
    assert_close(out, y.astype(np.float64) * 0.3, what="scale")
    fill(0.3, out)
    assert_same_bits(out, np.full(shape, np.float32(0.3).astype(kind)), "fill")


def run_cast(rng, shape, dtype, target):
    x = rng.standard_normal(shape, np.float32).astype(device.dtype(dtype))
    out = device.xp().zeros(shape, device.dtype(target))
    cast(device.asarray(x), out)
    assert_same_bits(out, x.astype(np.float32).astype(device.dtype(target)), f"cast {dtype} to {target}")


def run_rows(rng, count, limit, columns, dtype):
    x = rng.standard_normal((limit, columns), np.float32).astype(device.dtype(dtype))
    rows = rng.permutation(limit)[:count].astype(np.int32)
    gathered = device.xp().full((count, columns), np.nan, x.dtype)
    gather_rows(device.asarray(x), device.asarray(rows), gathered)
    assert_same_bits(gathered, gather_rows_ref(x, rows), "gather_rows")
    out = device.asarray(-x)
    scatter_rows(gathered, device.asarray(rows), out)
    assert_same_bits(out, scatter_rows_ref(x[rows], rows, -x), "scatter_rows")
    # Any bits, of which some are no numbers.
    x = rng.integers(0, 256, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape)
    gather_rows(device.asarray(x), device.asarray(rows), gathered)
    assert_same_bits(gathered, gather_rows_ref(x, rows), "gather_rows of any bits")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in SMALL if dtype == "float32" else SMALL[1:3]:
        run_arithmetic(rng, shape, dtype)
    for target in ("float32", "float16", "bfloat16"):
        run_cast(rng, (9,), dtype, target)
    for count, limit, columns in [(1, 1, 1), (3, 5, 6), (0, 2, 4), (2, 3, 131), (1, 2, 1024)]:
        run_rows(rng, count, limit, columns, dtype)


def test_parts_of_arrays(rng):
    """Arrays that begin anywhere, as parts of a flat buffer do."""
    x, y = (device.asarray(rng.standard_normal(50, np.float32)) for _ in range(2))
    for first in range(4):
        out = device.xp().zeros(50, np.float32)
        add(x[first:41], y[1 : 42 - first], out[2 : 43 - first])
        expected = np.zeros(50, np.float32)
        expected[2 : 43 - first] = device.to_host(x)[first:41] + device.to_host(y)[1 : 42 - first]
        assert_same_bits(out, expected, f"from {first} on")


@pytest.mark.parametrize("element,vector", [("uint16", 8), ("float32", 4)])
def test_kernels_compile_for_gpus(compile_offline, element, vector):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    x, troubles = f"{element}[::1]", []
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        for op in ("add", "scale", "fill"):
            kernel = elementwise_kernel(op, vector, vector, False)
            troubles += compile_offline(kernel, [x, x, "float32", x], architecture)
        if element == "float32":
            kernel = elementwise_kernel("fold", vector, vector, False)
            troubles += compile_offline(kernel, [x, x, "float32", x], architecture)
        types = [x, "float32[::1]", "float32", "float32[::1]"]
        troubles += compile_offline(elementwise_kernel("cast", 4, 4, False), types, architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("shape", SMALL + [(64, 768)])
def test_numpy_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("NumPy as operator")
    run_arithmetic(rng, shape, "float32")
    run_cast(rng, shape, "float32", "bfloat16")
    run_cast(rng, shape, "bfloat16", "float32")
    run_rows(rng, 5, 9, 33, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype):
    run_arithmetic(rng, shape, dtype)
    for target in ("float32", "float16", "bfloat16"):
        run_cast(rng, shape, dtype, target)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "count,limit,columns", [(1, 1, 1), (4096, 8191, 1024), (999, 1000, 1001), (0, 2, 1024), (70_000, 70_001, 24)]
)
def test_gpu_rows(rng, count, limit, columns, dtype):
    run_rows(rng, count, limit, columns, dtype)


def test_wrong_arguments_are_named():
    xp = device.xp()
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"add: y must be \(2, 8\) float32, got \(2, 7\) float32"):
        add(x, xp.zeros((2, 7), np.float32), x)
    with pytest.raises(ValueError, match=r"scale: x must be \(2, 8\) float32 or .*, got \(2, 8\) float64"):
        scale(xp.zeros((2, 8)), 1.0, x)
    with pytest.raises(ValueError, match=r"cast: out must be \(2, 8\)"):
        cast(x, xp.zeros(16, np.float32))
    with pytest.raises(ValueError, match=r"fill: out must be .* got \(8, 2\) float32, not C-contiguous"):
        fill(0.0, x.T)
    with pytest.raises(ValueError, match=r"gather_rows: rows must be \(any\) int32"):
        gather_rows(x, xp.zeros(2, np.int64), x)
    with pytest.raises(ValueError, match=r"scatter_rows: out must be \(any, 8\) float32"):
        scatter_rows(x, xp.zeros(2, np.int32), xp.zeros((4, 7), np.float32))
