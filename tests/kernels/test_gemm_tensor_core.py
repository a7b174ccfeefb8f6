import numpy as np
import pytest

from rlnumba import device
from rlnumba.kernels.gemm_tensor_core import Tile, tensor_core_product
from tests.close import assert_close


def matrix(rng, shape, dtype):
    return rng.standard_normal(shape).astype(device.dtype(dtype))


def run(rng, tile, m, n, k):
    """Compare one product with float64."""
    a = matrix(rng, (k, m) if tile.a_mn else (m, k), tile.element)
    b = matrix(rng, (k, n) if tile.b_mn else (n, k), tile.element)
    bias, residual = matrix(rng, n, tile.element), matrix(rng, (m, n), tile.element)
    out = device.xp().ones((m, n), a.dtype if tile.output == "same" else np.float32)
    tensor_core_product(
        tile,
        device.asarray(a),
        device.asarray(b),
        out,
        device.asarray(bias) if tile.bias else None,
        device.asarray(residual) if tile.residual else None,
    )
    a, b, bias, residual = (x.astype(np.float64) for x in (a, b, bias, residual))
    expected = (a.T if tile.a_mn else a) @ (b if tile.b_mn else b.T)
    expected = expected + tile.bias * bias + tile.residual * residual + (tile.output == "add")
    assert_close(out, expected, terms=k, scale=float(np.abs(expected).max()) + np.sqrt(k), what=f"{tile} {m} {n} {k}")


SIMULATED = [
    # More rounds than stages, ragged edges in every direction, two tiles each way.
    (Tile(32, 32, 2, 1, 32, 3, "bfloat16"), 40, 40, 136),
    (Tile(32, 64, 1, 2, 64, 2, "float16", b_mn=True, residual=True), 20, 72, 72),
    (Tile(64, 64, 1, 2, 32, 2, "bfloat16", a_mn=True, b_mn=True, output="add"), 72, 72, 40),
    (Tile(16, 32, 1, 1, 64, 4, "bfloat16", output="float32"), 17, 40, 64),
    # A warp's part of C goes in two lines, and the residual has no place of its own.
    (Tile(16, 128, 1, 1, 32, 3, "float16", bias=True, residual=True), 9, 128, 40),
    # One row, and fewer rounds than stages.
    (Tile(16, 32, 1, 2, 32, 4, "bfloat16", bias=True), 1, 24, 8),
]


@pytest.mark.parametrize("tile, m, n, k", SIMULATED)
@pytest.mark.sim
def test_simulator(rng, tile, m, n, k):
    if device.name() == "cuda":
        pytest.skip("test_gpu has these")
    run(rng, tile, m, n, k)
