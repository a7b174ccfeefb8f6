import numpy as np
import pytest

from rlnumba.kernels.nn import rmsnorm as rmsnorm_module
from rlnumba.kernels.nn.elementwise import add
from rlnumba.kernels.nn.norm_to_residual import norm_to_residual, norm_to_residual_kernel
from rlnumba.kernels.nn.rmsnorm import FORWARD, rmsnorm, share_row
from rlnumba.runtime import device
from tests.close import assert_same_bits

EPS = 1e-6


def check_bits(rng, shape, dtype, unit_offset=True):
    """Those of rmsnorm and add, into an array of its own and in place of the residual."""
    x, residual = (device.asarray(rng.standard_normal(shape).astype(device.dtype(dtype))) for _ in range(2))
    weight, xp = device.asarray(rng.standard_normal(shape[1]).astype(device.dtype(dtype))), device.xp()
    expected, expected_rstd = xp.empty(shape, x.dtype), xp.empty(shape[:1], np.float32)
    rmsnorm(x, weight, EPS, expected, expected_rstd, unit_offset)
    add(residual, expected, expected)
    out, rstd = xp.full(shape, np.nan, x.dtype), xp.full(shape[:1], np.nan, np.float32)
    norm_to_residual(x, weight, EPS, residual, out, rstd, unit_offset)
    assert_same_bits(out, expected, "out")
    assert_same_bits(rstd, expected_rstd, "rstd")
    norm_to_residual(x, weight, EPS, residual, residual, rstd, unit_offset)
    assert_same_bits(residual, expected, "in place")


@pytest.mark.sim
@pytest.mark.parametrize("shape, dtype", [((3, 48), "bfloat16"), ((2, 129), "float16"), ((2, 600), "float32")])
def test_bits(rng, shape, dtype):
    if device.name() == "cpu":
        dtype = "float32"
    check_bits(rng, shape, dtype)


@pytest.mark.sim
def test_many_rows(rng, monkeypatch):
    """Several of them share a block."""
    monkeypatch.setattr(rmsnorm_module, "FEW_ROWS", 0)
    check_bits(rng, (5, 64), "float32" if device.name() == "cpu" else "bfloat16", unit_offset=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(0, 8), (1, 640), (8, 5376), (1025, 1152), (4097, 2560), (300, 16384)])
def test_gpu(rng, shape, dtype):
    check_bits(rng, shape, dtype)


@pytest.mark.parametrize("columns", [640, 5376])
def test_kernels_compile_for_gpus(compile_offline, columns):
    """Rows of Gemma 3 270M and 27B."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    rows, row = "uint16[:,::1]", "uint16[::1]"
    types = [rows, row, "float32", rows, rows, "float32[::1]"]
    troubles = []
    for few_rows in (False, True):
        kernel = norm_to_residual_kernel(share_row(columns, 2, 8, *FORWARD), few_rows, True)
        for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
            troubles += compile_offline(kernel, types, architecture)
    assert not troubles, "\n".join(troubles)


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, weight, rstd = xp.zeros((2, 8), np.float32), xp.zeros(8, np.float32), xp.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"norm_to_residual: residual must be \(2, 8\) float32, got \(2, 7\) float32"):
        norm_to_residual(x, weight, EPS, xp.zeros((2, 7), np.float32), x.copy(), rstd)
    with pytest.raises(ValueError, match="norm_to_residual: rows must have 1 to 16384 columns, got 0"):
        norm_to_residual(xp.zeros((2, 0), np.float32), weight, EPS, x, x.copy(), rstd)
