import numpy as np
import pytest

from rlnumba.kernels.nn.scalar_head import (
    scalar_head,
    scalar_head_backward,
    scalar_head_backward_kernel,
    scalar_head_backward_ref,
    scalar_head_kernel,
    scalar_head_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits

# (T, N, D): one; a block's lines and one more, of columns that no vector divides; a warp's columns in 16 and 32 bits,
# and one more; no row; one row of several column blocks.
SMALL = [(1, 1, 1), (9, 11, 37), (8, 8, 256), (17, 20, 129), (0, 3, 8), (1, 2, 520)]
REAL = [(4096, 8191, 1024), (16_384, 16_384, 4096), (1001, 2000, 1001), (64, 40_000, 2560)]


def arrays(rng, count, limit, columns, dtype):
    """(hidden, rows, weight, dout, dhidden, dweight) on the host."""
    kind = device.dtype(dtype)
    hidden, before = (rng.standard_normal((limit, columns), np.float32).astype(kind) for _ in range(2))
    weight = rng.standard_normal((1, columns), np.float32).astype(kind)
    rows = rng.permutation(limit)[:count].astype(np.int32)
    dout, dweight = rng.standard_normal(count, np.float32), rng.standard_normal((1, columns), np.float32)
    return hidden, rows, weight, dout, before, dweight


def run(rng, count, limit, columns, dtype="float32"):
    host = hidden, rows, weight, dout, before, dweight = arrays(rng, count, limit, columns, dtype)
    on_device = hidden_d, rows_d, weight_d, _, dhidden_d, dweight_d = [device.asarray(a.copy()) for a in host]
    out = device.xp().full(count, np.nan, np.float32)
    scalar_head(hidden_d, rows_d, weight_d, out)
    wide, wide_weight, wide_dout = (a.astype(np.float64) for a in (hidden, weight, dout))
    assert_close(out, scalar_head_ref(wide, rows, wide_weight), terms=columns, scale=10.0 * np.sqrt(columns))
    scalar_head_backward(*on_device)
    row_gradient, weight_gradient = scalar_head_backward_ref(wide, rows, wide_weight, wide_dout)
    expected = before.astype(np.float64)
    expected[rows] += row_gradient
    assert_close(dhidden_d, expected, what="dhidden")
    others = np.setdiff1d(np.arange(limit), rows)
    assert_same_bits(device.to_host(dhidden_d)[others], before[others], "other rows of dhidden")
    assert_close(dweight_d, dweight + weight_gradient, terms=count + 1, scale=10.0 * np.sqrt(count + 1), what="dweight")


def test_gradient_of_reference(rng):
    hidden, weight, dout = rng.standard_normal((5, 7)), rng.standard_normal((1, 7)), rng.standard_normal(3)
    rows = np.array([4, 0, 2])

    def loss():
        return float(np.sum(scalar_head_ref(hidden, rows, weight) * dout))

    row_gradient, weight_gradient = scalar_head_backward_ref(hidden, rows, weight, dout)
    dhidden = np.zeros_like(hidden)
    dhidden[rows] = row_gradient
    assert_gradient(loss, dhidden, hidden, "dhidden")
    assert_gradient(loss, weight_gradient, weight, "dweight")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in SMALL if dtype == "float32" else SMALL[1:3]:
        run(rng, *shape, dtype)


@pytest.mark.parametrize("shape", [*SMALL, (300, 400, 1001)])
def test_numpy_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("NumPy as operator")
    run(rng, *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype):
    run(rng, *shape, dtype)


@pytest.mark.parametrize("element,vector", [("uint16", 8), ("float32", 4)])
def test_kernels_compile_for_gpus(compile_offline, element, vector):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    x, f32, rows, troubles = f"{element}[:,::1]", "float32[::1]", "int32[::1]", []
    for architecture in ((8, 0), (9, 0)):
        for bounded in (False, True):
            kernel = scalar_head_kernel(vector, vector, bounded)
            troubles += compile_offline(kernel, [x, rows, x, f32], architecture)
            kernel = scalar_head_backward_kernel(vector, vector, bounded)
            troubles += compile_offline(kernel, [x, rows, x, f32, x, "float32[:,::1]"], architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("columns", [37, pytest.param(1024, marks=pytest.mark.gpu)])
def test_a_row_depends_on_itself_alone(rng, columns):
    hidden, _, weight, *_ = map(device.asarray, arrays(rng, 0, 40, columns, "float32"))
    together = device.xp().empty(40, np.float32)
    scalar_head(hidden, device.asarray(np.arange(40, dtype=np.int32)), weight, together)
    for row in (0, 7, 39):
        alone = device.xp().empty(1, np.float32)
        scalar_head(hidden[row : row + 1].copy(), device.asarray(np.zeros(1, np.int32)), weight, alone)
        assert_same_bits(alone, together[row : row + 1], f"row {row}")


@pytest.mark.sim
def test_a_row_number_outside(rng):
    """NaN forward, and nothing added backward; the cpu device raises (test_wrong_arguments_are_named)."""
    host = hidden, _, weight, dout, before, dweight = arrays(rng, 3, 4, 8, "float32")
    rows = np.array([1, 4, -1], np.int32)
    hidden_d, _, weight_d, dout_d, dhidden_d, dweight_d = [device.asarray(a.copy()) for a in host]
    rows_d, out = device.asarray(rows), device.xp().zeros(3, np.float32)
    scalar_head(hidden_d, rows_d, weight_d, out)
    assert list(np.isnan(device.to_host(out))) == [False, True, True]
    scalar_head_backward(hidden_d, rows_d, weight_d, dout_d, dhidden_d, dweight_d)
    expected = before.copy()
    expected[1] += dout[0] * weight[0]
    assert_close(dhidden_d, expected, what="dhidden")
    assert_close(dweight_d, dweight + dout[0] * hidden[1], what="dweight")


def test_wrong_arguments_are_named(rng):
    host = arrays(rng, 2, 3, 4, "float32")
    hidden, rows, weight, dout, dhidden, dweight = map(device.asarray, host)
    out = device.xp().empty(2, np.float32)
    with pytest.raises(ValueError, match=r"scalar_head: weight must be \(1, 4\) float32, got \(1, 3\) float32"):
        scalar_head(hidden, rows, device.xp().zeros((1, 3), np.float32), out)
    with pytest.raises(ValueError, match=r"scalar_head: out must be \(2\) float32, got \(1,\) float32"):
        scalar_head(hidden, rows, weight, out[:1])
    with pytest.raises(ValueError, match=r"scalar_head_backward: dhidden must be \(3, 4\) float32, got \(2, 4\)"):
        scalar_head_backward(hidden, rows, weight, dout, dhidden[:2], dweight)
    with pytest.raises(ValueError, match=r"scalar_head: hidden must have at least 1 column, got 0"):
        scalar_head(device.xp().zeros((3, 0), np.float32), rows, device.xp().zeros((1, 0), np.float32), out)
    if device.name() == "cpu":
        rows = np.array([0, 3], np.int32)
        with pytest.raises(ValueError, match=r"scalar_head: rows must be in \[0, 3\), got 3"):
            scalar_head(hidden, rows, weight, out)
        with pytest.raises(ValueError, match=r"scalar_head_backward: rows must be in \[0, 3\), got 3"):
            scalar_head_backward(hidden, rows, weight, dout, dhidden, dweight)
