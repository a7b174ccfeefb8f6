import numpy as np
import pytest

from rlnumba.kernels.nn.gated_sum import gated_sum, gated_sum_backward, gated_sum_backward_ref, gated_sum_ref
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits

# (N, D): a lane's vectors and more, single elements, and rows without a neighbour.
SMALL = [(3, 16), (2, 6), (0, 8), (1, 264), (9, 131)]
REAL = [(4097, 2048), (1, 2048), (300, 1001)]


def arrays(rng, shape):
    """(x, y, z, dout (N, D), gate (N, 1)) on the host, in float64."""
    return [*(2 * rng.standard_normal(shape) for _ in range(4)), 2 * rng.standard_normal((shape[0], 1))]


def run_all(rng, shape, dtype):
    host = [a.astype(device.dtype(dtype)) for a in arrays(rng, shape)]
    (x, y, z, dout, gate), wide = [device.asarray(a) for a in host], [a.astype(np.float64) for a in host]
    xp, kind = device.xp(), host[0].dtype
    out, dz, dgate = xp.full(shape, np.nan, kind), xp.full(shape, np.nan, kind), xp.full((shape[0], 1), np.nan, kind)
    gated_sum(x, y, z, gate, out)
    # Each of the sums is rounded, which are at most as large as their terms together.
    largest = np.max(sum(map(np.abs, wide[:3])), initial=0.0)
    assert_close(out, gated_sum_ref(*wide[:3], wide[4]), terms=4, scale=largest, what="out")
    gated_sum_backward(dout, z, gate, dz, dgate)
    expected = gated_sum_backward_ref(wide[3], wide[2], wide[4])
    assert_close(dz, expected[0], terms=4, what="dz")
    # Its terms are about 4; the sum, which is rounded at the end, may be larger.
    largest = max(4, np.max(np.abs(expected[1]), initial=0.0))
    assert_close(dgate, expected[1], terms=4 * shape[1], scale=largest, what="dgate")
    for row in range(min(shape[0], 3)):
        alone = [xp.ascontiguousarray(a[row : row + 1]) for a in (x, y, z, dout, gate)]
        one, one_dgate = xp.empty((1, shape[1]), kind), xp.empty((1, 1), kind)
        gated_sum(*alone[:3], alone[4], one)
        assert_same_bits(one[0], out[row], f"row {row} alone")
        gated_sum_backward(alone[3], alone[2], alone[4], one, one_dgate)
        assert_same_bits(one_dgate[0], dgate[row], f"dgate of row {row} alone")
    gated_sum_backward(dout, z, gate, z, dgate)
    assert_same_bits(z, dz, "in place")


def test_gradient_of_reference(rng):
    x, y, z, dout, gate = arrays(rng, (3, 5))
    dz, dgate = gated_sum_backward_ref(dout, z, gate)

    def loss():
        return float(np.sum(gated_sum_ref(x, y, z, gate) * dout))

    assert_gradient(loss, dz, z, "dz")
    assert_gradient(loss, dgate, gate, "dgate")
    assert_gradient(loss, dout, y, "dy")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in SMALL:
        run_all(rng, shape, dtype)


@pytest.mark.parametrize("shape", SMALL)
def test_cpu_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run_all(rng, shape, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype):
    run_all(rng, shape, dtype)


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, gate = xp.zeros((2, 4), np.float32), xp.zeros((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"gated_sum: gate must be \(2, 1\) float32, got \(2, 2\) float32"):
        gated_sum(x, x, x, gate, x)
