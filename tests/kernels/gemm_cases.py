"""What the tests of the GEMM families share: one product by one config, and the operators at the shapes of models."""

import numpy as np

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm import sm90
from rlnumba.kernels.gemm.reduction import Reduction
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig
from rlnumba.kernels.nn.lora import scale_adapters
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits

SHAPES_OF_MODELS = [
    (16_384, 1024, 2048),
    (4097, 4096, 1024),
    (1000, 6144, 1024),
    (257, 1024, 3072),
    (64, 152, 1024),
    (1, 4096, 8),
]


def matrix(rng, shape, dtype):
    return rng.standard_normal(shape).astype(device.dtype(dtype))


def random_adapters(rng, adapters, columns, k, rows, element):
    """A Reduction of some adapters of `columns` each, of which the rows have one or none; one for all if it is 1."""
    a = device.asarray((rng.standard_normal((adapters * columns, k)) / k**0.5).astype(device.dtype(element)))
    ids = device.asarray(rng.integers(-1, adapters, rows).astype(np.int32)) if adapters > 1 else None
    return Reduction(a, device.asarray(rng.uniform(0.5, 2, adapters).astype(np.float32)), ids)


def reduced(x, reduction):
    """s x A^T by the kernels that compute nothing else."""
    xa = device.xp().full((len(x), len(reduction.a)), np.nan, x.dtype)
    # As many stages as rounds: their order is not what is tested.
    config = Sm90GemmConfig(64, 1, 8, x.dtype.name)
    sm90.gemm_with_config(config, x, reduction.a, xa)
    scale_adapters(xa, reduction.scales, reduction.adapter_ids, xa)
    return xa


def check_config(rng, gemm_with_config, config, m, n, k):
    """Compare one product by the kernel of a config with float64."""
    a = matrix(rng, (k, m) if config.a_mn else (m, k), config.element)
    b = matrix(rng, (k, n) if config.b_mn else (n, k), config.element)
    bias, residual = matrix(rng, n, config.element), matrix(rng, (m, n), config.element)
    out = device.xp().ones((m, n), a.dtype if config.output == "same" else np.float32)
    low_rank = {}
    if getattr(config, "low_rank", False):
        pair = matrix(rng, (m, 24), config.element), matrix(rng, (24, n) if config.b_mn else (n, 24), config.element)
        low_rank = {"low_rank": tuple(map(device.asarray, pair))}
        a, b = np.concatenate([a, pair[0]], axis=1), np.concatenate([b, pair[1]], axis=0 if config.b_mn else 1)
    gemm_with_config(
        config,
        device.asarray(np.ascontiguousarray(a[:, :k]) if low_rank else a),
        device.asarray(np.ascontiguousarray(b[:k] if config.b_mn else b[:, :k]) if low_rank else b),
        out,
        device.asarray(bias) if config.bias else None,
        device.asarray(residual) if config.residual else None,
        **low_rank,
    )
    a, b, bias, residual = (x.astype(np.float64) for x in (a, b, bias, residual))
    expected = (a.T if config.a_mn else a) @ (b if config.b_mn else b.T)
    expected = expected + config.bias * bias + config.residual * residual + (config.output == "add")
    scale = float(np.abs(expected).max()) + np.sqrt(k)
    assert_close(out, expected, terms=k, scale=scale, what=f"{config} {m} {n} {k}")


def check_operators(rng, dtype, m, n, k):
    """On a GPU: forward with bias and residual, dx and dweight, against cuBLAS in float32."""
    import cupy

    x, w, dout = (device.asarray(matrix(rng, s, dtype)) for s in ((m, k), (n, k), (m, n)))
    bias, residual = device.asarray(matrix(rng, n, dtype)), device.asarray(matrix(rng, (m, n), dtype))
    wide_x, wide_w, wide_dout = (a.astype(np.float32) for a in (x, w, dout))
    out, logits = cupy.full((m, n), np.nan, x.dtype), cupy.full((m, n), np.nan, np.float32)
    dx, dweight = cupy.full((m, k), np.nan, x.dtype), cupy.ones((n, k), np.float32)
    gemm.linear(x, w, out)
    expected = device.to_host(wide_x @ wide_w.T)
    assert_close(out, expected, terms=k, what="out")
    gemm.linear(x, w, logits)
    assert_close(logits, expected, terms=k, what="float32 out")
    gemm.linear(x, w, out, bias=bias, residual=residual)
    expected = expected + device.to_host(bias.astype(np.float32)) + device.to_host(residual.astype(np.float32))
    assert_close(out, expected, terms=k, what="out with bias and residual")
    gemm.linear_backward_input(dout, w, dx)
    expected = device.to_host(wide_dout @ wide_w)
    assert_close(dx, expected, terms=n, what="dx")
    before = dx.copy()
    gemm.linear_backward_input(dout, w, dx, accumulate=True)
    assert_close(dx, expected + device.to_host(before.astype(np.float32)), terms=n, what="dx, accumulated")
    gemm.linear_backward_weight(dout, x, dweight)
    expected = device.to_host(wide_dout.T @ wide_x)
    assert_close(dweight, expected + 1, terms=m, what="dweight")
    dweight = cupy.full((n, k), np.nan, x.dtype)
    gemm.linear_backward_weight(dout, x, dweight, accumulate=False)
    assert_close(dweight, expected, terms=m, what="dweight, overwritten")


def check_rows(whole, product, rows):
    """product(m, out) of the first m rows has the bits of the first rows of `whole`."""
    for m in rows:
        part = device.xp().zeros((m, whole.shape[1]), whole.dtype)
        product(m, part)
        assert_same_bits(part, whole[:m], f"M = {m}")
