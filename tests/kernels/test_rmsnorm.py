import numpy as np
import pytest

from rlnumba import device
from rlnumba.kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_backward_ref, rmsnorm_ref, rmsnorm_residual
from tests.close import assert_close, assert_gradient, assert_same_bits

EPS = 1e-6
SMALL = [(1, 1), (3, 48), (17, 129), (0, 8)]
REAL = [(4096, 1024), (1, 4096), (4097, 1000), (0, 1024)]


def arrays(rng, shape, dtype):
    x, dout, residual = (rng.standard_normal(shape).astype(device.dtype(dtype)) for _ in range(3))
    weight = rng.uniform(0.5, 1.5, shape[1]).astype(device.dtype(dtype))
    return x, dout, residual, weight


def run_all(rng, shape, dtype):
    x, dout, residual, weight = arrays(rng, shape, dtype)
    wide = [a.astype(np.float64) for a in (x, dout, residual, weight)]
    xd, dd, rd, wd = (device.asarray(a.copy()) for a in (x, dout, residual, weight))
    xp, columns = device.xp(), shape[1]
    out, rstd = xp.full(shape, np.nan, x.dtype), xp.full(shape[:1], np.nan, np.float32)
    rmsnorm(xd, wd, EPS, out, rstd)
    expected, expected_rstd = rmsnorm_ref(wide[0], wide[3], EPS)
    assert_close(out, expected, terms=columns, what="out")
    assert_close(rstd, expected_rstd, terms=columns, what="rstd")

    dx = device.asarray(residual.copy())
    dweight = xp.ones(columns, np.float32)
    rmsnorm_backward(dd, xd, wd, rstd, dx, dweight, accumulate=True)
    expected_dx, expected_dw = rmsnorm_backward_ref(wide[1], wide[0], wide[3], expected_rstd)
    # dx cancels (entirely when D = 1), so its error is that of its terms.
    size = np.max(np.abs(wide[1] * wide[3] * expected_rstd[:, None]), initial=0.0)
    assert_close(dx, expected_dx + wide[2], terms=columns, scale=size + 3, what="dx accumulated")
    assert_close(dweight, expected_dw + 1, terms=shape[0] + 1, scale=np.sqrt(shape[0]) + 3, what="dweight")
    dx.fill(np.nan)
    rmsnorm_backward(dd, xd, wd, rstd, dx, dweight)
    assert_close(dx, expected_dx, terms=columns, scale=size, what="dx")

    rmsnorm_residual(xd, rd, wd, EPS, out, rstd)
    stored = (wide[0] + wide[2]).astype(x.dtype)
    assert_same_bits(rd, (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype), "residual")
    assert_close(out, rmsnorm_ref(stored.astype(np.float64), wide[3], EPS)[0], terms=columns, what="out of residual")


def test_gradient_of_reference(rng):
    x, dout, _, weight = (a.astype(np.float64) for a in arrays(rng, (3, 5), "float32"))
    dx, dweight = rmsnorm_backward_ref(dout, x, weight, rmsnorm_ref(x, weight, EPS)[1])

    def loss():
        return float(np.sum(rmsnorm_ref(x, weight, EPS)[0] * dout))

    assert_gradient(loss, dx, x, "dx")
    assert_gradient(loss, dweight, weight, "dweight")


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.sim
def test_simulator(rng, shape):
    run_all(rng, shape, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.sim
def test_simulator_16_bit(rng, dtype):
    run_all(rng, (2, 130), dtype)


@pytest.mark.parametrize("shape", SMALL + [(64, 1024)])
def test_numpy_device(rng, shape):
    if device.name() != "numpy":
        pytest.skip("the reference as operator")
    run_all(rng, shape, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype):
    run_all(rng, shape, dtype)


def test_a_row_depends_on_itself_alone(rng):
    rows = 3 if device.name() == "sim" else 65
    x, _, _, weight = (device.asarray(a) for a in arrays(rng, (rows, 96), "float32"))
    xp = device.xp()
    out, rstd = xp.empty_like(x), xp.empty(rows, np.float32)
    rmsnorm(x, weight, EPS, out, rstd)
    alone, alone_rstd = xp.empty_like(x[:1]), xp.empty(1, np.float32)
    for row in range(rows):
        rmsnorm(x[row : row + 1].copy(), weight, EPS, alone, alone_rstd)
        assert_same_bits(alone[0], out[row], f"row {row}")


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, out, rstd = xp.zeros((2, 8), np.float32), xp.zeros((2, 7), np.float32), xp.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"rmsnorm: out must be \(2, 8\) float32, got \(2, 7\) float32"):
        rmsnorm(x, xp.ones(8, np.float32), EPS, out, rstd)
    with pytest.raises(ValueError, match=r"rmsnorm: weight must be \(8\) float32, got \(8,\) float64"):
        rmsnorm(x, xp.ones(8, np.float64), EPS, x, rstd)
