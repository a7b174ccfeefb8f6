import numpy as np
import pytest

from rlnumba.errors import ConfigError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.cublas import addends_kernel
from rlnumba.kernels.gemm.ops import (
    bias_backward,
    linear,
    linear_backward_input,
    linear_backward_ref,
    linear_backward_weight,
    linear_ref,
    linear_swiglu,
)
from rlnumba.kernels.nn.swiglu import swiglu
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.launch import launch
from tests.close import assert_close, assert_gradient, assert_same_bits

# M, N, K: one; below and above a tile in each; nothing to sum; no rows; no columns.
SMALL = [(1, 1, 1), (7, 9, 17), (9, 17, 7), (3, 5, 0), (0, 5, 3), (5, 0, 3)]
QWEN3_06B = [(4096, 4096, 1024), (4096, 1024, 2048), (4096, 6144, 1024), (4096, 1024, 3072)]
ODD = [(4097, 1001, 1023), (1, 151936, 1024), (37, 50257, 768)]


def random(rng, shape, dtype):
    return rng.standard_normal(shape, np.float32).astype(device.dtype(dtype))


def run_all(rng, shape, dtype):
    m, n, k = shape
    x, weight, bias, residual, dout = (random(rng, s, dtype) for s in [(m, k), (n, k), n, (m, n), (m, n)])
    xd, wd, bd, rd, dd = (device.asarray(a.copy()) for a in (x, weight, bias, residual, dout))
    # float64 is the oracle where it is quick, else float32, whose error is of the same order.
    exact = np.float64 if m * n * k < 1 << 24 else np.float32
    x, weight, bias, residual, dout = (a.astype(exact) for a in (x, weight, bias, residual, dout))
    xp = device.xp()

    def close(actual, expected, terms, what):
        size = max(4 + 4 * np.sqrt(terms), float(np.abs(expected).max(initial=0.0)))
        assert_close(actual, expected, terms=terms, scale=size, what=what)

    product = linear_ref(x, weight)
    out = xp.full((m, n), np.nan, xd.dtype)
    linear(xd, wd, out)
    close(out, product, k, "out")
    linear(xd, wd, out, bias=bd)
    close(out, product + bias, k, "out with bias")
    linear(xd, wd, out, bias=bd, residual=rd)
    # cuBLAS rounds bias + residual first.
    assert_close(out, product + bias + residual, dtype, 4 * k + 16, 8 + 8 * np.sqrt(k), "out with bias and residual")
    out[...] = rd
    linear(xd, wd, out, residual=out)
    close(out, product + residual, k, "out in place of the residual")
    logits = xp.full((m, n), np.nan, np.float32)
    linear(xd, wd, logits, bias=bd)
    close(logits, product + bias, k, "float32 out")

    dx_expected, dweight_expected, dbias_expected = linear_backward_ref(dout, x, weight)
    dx = xp.full((m, k), np.nan, xd.dtype)
    linear_backward_input(dd, wd, dx)
    close(dx, dx_expected, n, "dx")
    linear_backward_input(dd, wd, dx, accumulate=True)
    assert_close(dx, 2 * dx_expected, dtype, 4 * n + 16, 8 + 8 * np.sqrt(n), "dx accumulated")
    wide_dx = xp.ones((m, k), np.float32)
    linear_backward_input(dd, wd, wide_dx, accumulate=True)
    assert_close(wide_dx, dx_expected + 1, terms=n + 1, scale=8 + 8 * np.sqrt(n), what="dx accumulated in float32")
    dweight, dbias = xp.ones((n, k), np.float32), xp.ones(n, np.float32)
    linear_backward_weight(dd, xd, dweight)
    close(dweight, dweight_expected + 1, m + 1, "dweight")
    dweight = xp.full((n, k), np.nan, xd.dtype)
    linear_backward_weight(dd, xd, dweight, accumulate=False)
    close(dweight, dweight_expected, m + 1, "dweight overwritten")
    bias_backward(dd, dbias)
    close(dbias, dbias_expected + 1, m + 1, "dbias")


def test_gradient_of_reference(rng):
    x, weight, bias, dout = (rng.standard_normal(shape) for shape in [(3, 4), (5, 4), 5, (3, 5)])
    dx, dweight, dbias = linear_backward_ref(dout, x, weight)

    def loss():
        return float(np.sum(linear_ref(x, weight, bias) * dout))

    assert_gradient(loss, dx, x, "dx")
    assert_gradient(loss, dweight, weight, "dweight")
    assert_gradient(loss, dbias, bias, "dbias")


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.sim
def test_simulator(rng, shape):
    run_all(rng, shape, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.sim
def test_simulator_16_bit(rng, dtype):
    run_all(rng, (5, 9, 10), dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.sim
def test_addends_of_cublas(rng, bias, residual):
    dtype = "bfloat16" if device.name() != "cpu" else "float32"
    b, r = random(rng, 300 if bias else 0, dtype), random(rng, (2 if residual else 0, 300), dtype)
    out = device.asarray(np.ones((2, 300), device.dtype(dtype)))
    launch(addends_kernel, 2, 256, device.asarray(b), device.asarray(r), out)
    expected = np.zeros((2, 300), np.float32)
    expected += b.astype(np.float32) if bias else 0
    expected += r.astype(np.float32) if residual else 0
    assert_same_bits(out, expected.astype(out.dtype), "bias + addend")


@pytest.mark.parametrize("shape", SMALL + [(33, 97, 100), (130, 96, 288), (1, 300, 1000), (2, 7, 16)])
def test_numpy_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("checks kernels/cpu/gemm.py")
    run_all(rng, shape, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + QWEN3_06B + ODD)
def test_gpu(rng, shape, dtype):
    run_all(rng, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + [(129, 1000, 1023)])
def test_gpu_by_our_own_kernel(rng, shape, dtype):
    gemm.set_backend("native")
    try:
        run_all(rng, shape, dtype)
    finally:
        gemm.set_backend("auto")


@pytest.mark.gpu
def test_gemm_can_be_captured_in_a_graph(rng):
    import cupy

    x, weight, residual = (device.asarray(random(rng, s, "bfloat16")) for s in [(64, 256), (512, 256), (64, 512)])
    expected, out = cupy.empty_like(residual), cupy.empty_like(residual)
    linear(x, weight, expected, residual=residual)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        linear(x, weight, out, residual=residual)
        stream.begin_capture()
        linear(x, weight, out, residual=residual)
        graph = stream.end_capture()
        out.fill(0)
        graph.launch()
        x *= 0
        graph.launch()
        stream.synchronize()
        assert_same_bits(out, residual, "a second replay sees the new x")
    linear(x, weight, expected, residual=residual)
    assert_same_bits(out, expected, "out of the graph")


@pytest.mark.parametrize("k", [1, 15, 16, 33, 288, 1031])
def test_numpy_rows_are_exact_in_any_batch(rng, k):
    if device.name() != "cpu":
        pytest.skip("checks kernels/cpu/gemm.py")
    n = 101 if k < 1000 else 1003
    rows = random(rng, (1000, k), "float32")
    weight, bias = random(rng, (n, k), "float32"), random(rng, n, "float32")
    whole = np.empty((1000, n), np.float32)
    linear(rows, weight, whole, bias=bias)
    for m in (1, 2, 3, 4, 5, 8, 16, 17, 64, 999):
        for first in (0, 1000 - m, 1000 // 3 if m < 600 else 0):
            out = np.empty((m, n), np.float32)
            linear(rows[first : first + m], weight, out, bias=bias)
            assert_same_bits(out, whole[first : first + m], f"{m} rows from {first}")
    order = rng.permutation(1000)
    out = np.empty_like(whole)
    linear(rows[order], weight, out, bias=bias)
    assert_same_bits(out, whole[order], "shuffled rows")


# Families, and the dtypes that each of them computes.
FAMILY_DTYPES = [("simt", "float32"), *((f, d) for f in dispatch.FAMILIES for d in ("float16", "bfloat16"))]


@pytest.fixture
def family(request):
    """The GEMM family of a parameter; in the simulator without noting launches, which other tests have compiled."""
    if device.name() == "cpu":
        pytest.skip("the cpu device has one family")
    since, until = dispatch.RUNS_ON[request.param]
    if dispatch.architecture() is not None and not since <= dispatch.architecture() <= until:
        pytest.skip(f"needs a GPU that runs {request.param}")
    with dispatch.forced(f"gemm={request.param}"):
        yield request.param


def check_low_rank(rng, dtype, m, n, k, rank):
    """linear, linear_swiglu, linear_backward_input with a low rank, against float64; a row depends on itself alone."""
    shapes = (m, k), (n, k), (m, rank), (n, rank), (m, n), (rank, k)
    x, weight, down, up, residual, a = (random(rng, shape, dtype) for shape in shapes)
    arrays = [device.asarray(array) for array in (x, weight, down, up, residual, a)]
    xp, (x_, weight_, down_, up_, residual_, a_) = device.xp(), arrays
    x, weight, down, up, residual, a = (array.astype(np.float64) for array in (x, weight, down, up, residual, a))

    def outputs(rows):
        count = len(x_[rows])
        some, small = x_[rows].copy(), down_[rows].copy()
        out, in_place = xp.full((count, n), np.nan, x_.dtype), residual_[rows].copy()
        gate_up, activated = xp.full((count, n), np.nan, x_.dtype), xp.full((count, n // 2), np.nan, x_.dtype)
        dx, added = xp.full((count, k), np.nan, x_.dtype), some.copy()
        linear(some, weight_, out, low_rank=(small, up_))
        linear(some, weight_, in_place, residual=in_place, low_rank=(small, up_))
        linear_swiglu(some, weight_, gate_up, activated, low_rank=(small, up_))
        linear_backward_input(residual_[rows].copy(), weight_, dx, low_rank=(small, a_))
        linear_backward_input(residual_[rows].copy(), weight_, added, accumulate=True, low_rank=(small, a_))
        return out, in_place, gate_up, activated, dx, added

    whole = outputs(slice(m))
    product, dx = linear_ref(x, weight) + down @ up.T, residual @ weight + down @ a
    expected = product, product + residual, product, None, dx, dx + x
    for array, exact in zip(whole, expected, strict=True):
        if exact is not None:
            # Where the second product is added to a rounded one, there are two roundings.
            assert_close(array, exact, terms=4 * (k + n), scale=float(np.abs(exact).max()), what="low rank")
    assert_same_bits(whole[2], whole[0], "gate_up of linear_swiglu")
    separate = xp.full(whole[3].shape, np.nan, x_.dtype)
    swiglu(whole[2], separate)
    assert_same_bits(whole[3], separate)
    for rows in (slice(m - 1, m), slice(3, 12)):
        for some_rows, all_rows in zip(outputs(rows), whole, strict=True):
            assert_same_bits(some_rows, all_rows[rows], f"rows {rows}")


def test_low_rank(rng):
    if device.name() != "cpu":
        pytest.skip("test_low_rank_of_a_family has this")
    check_low_rank(rng, "float32", 33, 48, 40, 16)


@pytest.mark.sim
@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES, indirect=["family"])
def test_low_rank_of_a_family(rng, family, dtype):
    check_low_rank(rng, dtype, *{"simt": (17, 18, 20, 4), "sm80": (33, 32, 24, 16), "sm90": (65, 48, 40, 16)}[family])


def test_wrong_low_ranks_are_named():
    xp = device.xp()
    x, weight, out = xp.zeros((3, 8), np.float32), xp.zeros((5, 8), np.float32), xp.zeros((3, 5), np.float32)
    with pytest.raises(ValueError, match=r"linear: low_rank\[1\] must be \(5, 4\)"):
        linear(x, weight, out, low_rank=(xp.zeros((3, 4), np.float32), xp.zeros((5, 2), np.float32)))


def forms(x, weight, bias, residual, with_swiglu):
    """What a model computes of x by a weight, one form after the other."""
    xp, (m, n) = device.xp(), (len(x), len(weight))

    def empty(columns=n, dtype=x.dtype):
        return xp.full((m, columns), np.nan, dtype)

    plain, with_bias, with_residual, in_place, logits = empty(), empty(), empty(), residual.copy(), empty(n, np.float32)
    linear(x, weight, plain)
    linear(x, weight, with_bias, bias=bias)
    linear(x, weight, with_residual, bias=bias, residual=residual)
    linear(x, weight, in_place, bias=bias, residual=in_place)
    linear(x, weight, logits)
    if not with_swiglu:
        return plain, with_bias, with_residual, in_place, logits
    gate_up, activated = empty(), empty(n // 2)
    linear_swiglu(x, weight, gate_up, activated)
    return plain, with_bias, with_residual, in_place, logits, gate_up, activated


@pytest.mark.sim
@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES, indirect=["family"])
def test_a_row_depends_on_itself_alone(rng, family, dtype):
    """A row of every form has the same bits in decode and in training; fused forms have those of separate kernels."""
    # One row more than a tile, in decode's tiles and in training's.
    m, n, k = {"simt": (17, 18, 20), "sm80": (33, 32, 24), "sm90": (65, 48, 40)}[family]
    shapes = (m, k), (n, k), (n,), (m, n)
    x, weight, bias, residual = (device.asarray(random(rng, shape, dtype)) for shape in shapes)
    # Elsewhere linear_swiglu is linear and swiglu.
    fused = family == "sm90"
    whole = forms(x, weight, bias, residual, fused)
    plain, with_bias, with_residual, in_place, logits = whole[:5]
    assert_same_bits(in_place, with_residual, "out in place of the residual")
    if fused:
        gate_up, activated = whole[5:]
        assert_same_bits(gate_up, plain, "gate_up of linear_swiglu")
        separate = device.xp().full(activated.shape, np.nan, activated.dtype)
        swiglu(plain, separate)
        assert_same_bits(activated, separate, "linear_swiglu, and linear and swiglu")
    # The epilogue adds in float32 and rounds once.
    wide_bias, wide_residual = bias.astype(np.float32), residual.astype(np.float32)
    assert_same_bits(plain, logits.astype(x.dtype), "out, and float32 out")
    assert_same_bits(with_bias, (logits + wide_bias).astype(x.dtype), "bias")
    assert_same_bits(with_residual, (logits + wide_bias + wide_residual).astype(x.dtype), "bias and residual")
    for rows in (slice(m - 1, m), slice(3, 12)):
        alone = forms(x[rows].copy(), weight, bias, residual[rows].copy(), fused)
        for some_rows, all_rows in zip(alone, whole, strict=True):
            assert_same_bits(some_rows, all_rows[rows], f"rows {rows}")


def test_order_of_the_sum_is_the_documented_one(rng):
    if device.name() != "cpu":
        pytest.skip("checks kernels/cpu/gemm.py")
    x, weight = random(rng, (1, 50), "float32"), random(rng, (1, 50), "float32")
    lanes = np.zeros(16, np.float32)
    for k in range(50):
        # float64 holds the product of two float32 exactly, so this rounds once, as a fused multiply-add does.
        lanes[k % 16] = np.float32(np.float64(x[0, k]) * np.float64(weight[0, k]) + np.float64(lanes[k % 16]))
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    out = np.empty((1, 1), np.float32)
    linear(x, weight, out)
    assert_same_bits(out[0], lanes, "16 partial sums, halves added")


def test_backends():
    with pytest.raises(ConfigError, match="gemm must be auto or .* on device .*, got 'mkl'"):
        gemm.set_backend("mkl")
    gemm.set_backend("auto")
    assert gemm.backend() == {"cpu": "cpu", "sim": "native", "cuda": "native"}[device.name()]


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, weight, out = xp.zeros((2, 8), np.float32), xp.zeros((3, 7), np.float32), xp.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"linear: weight must be \(any, 8\) float32, got \(3, 7\) float32"):
        linear(x, weight, out)
    with pytest.raises(ValueError, match=r"linear_backward_weight: dweight must be \(3, 8\) float32"):
        linear_backward_weight(out, x, weight)
