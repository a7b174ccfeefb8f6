import numpy as np
import pytest

from rlnumba.kernels.gemm.grouped import (
    grouped_gemm,
    grouped_gemm_backward_ref,
    grouped_gemm_dw,
    grouped_gemm_dx,
    grouped_gemm_ref,
    grouped_gemm_swiglu,
)
from rlnumba.kernels.gemm.grouped_config import best_sm80_config, best_sm80_dw_config
from rlnumba.kernels.gemm.grouped_sm80 import grouped_gemm_dw_sm80_kernel, grouped_gemm_sm80_kernel
from rlnumba.kernels.gemm.ops import linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.nn.swiglu import swiglu
from rlnumba.runtime import device, dispatch
from tests.close import assert_close, assert_gradient, assert_same_bits
from tests.kernels.gemm_cases import matrix

# Rows of each expert: none, one, some; all of one; no rows at all.
COUNTS = [(3, 0, 17, 1, 0), (0, 0, 18), (0, 0)]


def starts_of(counts):
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def run_all(rng, dtype, counts, n, k):
    """Compare the three operators with float64."""
    starts, rows, experts = starts_of(counts), sum(counts), len(counts)
    x, weights, dy = (matrix(rng, shape, dtype) for shape in ((rows, k), (experts, n, k), (rows, n)))
    xd, wd, dyd, sd = (device.asarray(array.copy()) for array in (x, weights, dy, starts))
    x, weights, dy = (array.astype(np.float64) for array in (x, weights, dy))
    xp = device.xp()
    out, dx = xp.full((rows, n), np.nan, xd.dtype), xp.full((rows, k), np.nan, xd.dtype)
    grouped_gemm(xd, wd, sd, out)
    grouped_gemm_dx(dyd, wd, sd, dx)
    gate_up, activated = xp.full((rows, n), np.nan, xd.dtype), xp.full((rows, n // 2), np.nan, xd.dtype)
    if n % 2 == 0:
        grouped_gemm_swiglu(xd, wd, sd, gate_up, activated)
        separate = xp.full((rows, n // 2), np.nan, xd.dtype)
        swiglu(out, separate)
        assert_same_bits(gate_up, out, "gate_up")
        assert_same_bits(activated, separate, "SwiGLU")
    added, written = xp.ones((experts, n, k), np.float32), xp.full((experts, n, k), np.nan, np.float32)
    narrow = xp.full((experts, n, k), np.nan, xd.dtype)
    grouped_gemm_dw(dyd, xd, sd, added)
    grouped_gemm_dw(dyd, xd, sd, written, accumulate=False)
    grouped_gemm_dw(dyd, xd, sd, narrow, accumulate=False)
    expected_dx, expected_dw = grouped_gemm_backward_ref(dy, x, weights, starts)
    for actual, expected, terms, what in (
        (out, grouped_gemm_ref(x, weights, starts), k, "out"),
        (dx, expected_dx, n, "dx"),
        (added, expected_dw + 1, rows + 1, "dw, added"),
        (written, expected_dw, rows, "dw"),
        (narrow, expected_dw, rows, "dw, rounded"),
    ):
        scale = max(4 + 4 * np.sqrt(terms), float(np.abs(expected).max(initial=0.0)))
        assert_close(actual, expected, terms=max(terms, 1), scale=scale, what=what)
    for e in np.flatnonzero(np.array(counts) == 0):
        assert (device.to_host(narrow)[e] == 0).all() and (device.to_host(added)[e] == 1).all()


def test_gradient_of_reference(rng):
    starts = starts_of((2, 0, 3))
    x, weights, dy = rng.standard_normal((5, 4)), rng.standard_normal((3, 2, 4)), rng.standard_normal((5, 2))
    dx, dweights = grouped_gemm_backward_ref(dy, x, weights, starts)

    def loss():
        return float(np.sum(grouped_gemm_ref(x, weights, starts) * dy))

    assert_gradient(loss, dx, x, "dx")
    assert_gradient(loss, dweights, weights, "dweights")


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.sim
def test_simulator(rng, counts):
    run_all(rng, "float32", counts, 10, 18)


@pytest.mark.parametrize("counts", [*COUNTS, (100, 1, 0, 31, 2)])
def test_numpy_device(rng, counts):
    if device.name() != "cpu":
        pytest.skip("checks the cpu device")
    run_all(rng, "float32", counts, 40, 33)


# Families, and the dtypes that each of them computes; rows of the experts, N and K: a row more than a tile, and less.
FAMILY_CASES = {
    "simt": ((1, 0, 17), 18, 20),
    "sm80": ((1, 0, 19), 40, 24),
    "sm90": ((1, 0, 65), 72, 136),
}
FAMILY_DTYPES = [("simt", "float32"), *((family, "bfloat16") for family in FAMILY_CASES)]


@pytest.fixture
def family(request):
    """The GEMM family of a parameter."""
    if device.name() == "cpu":
        pytest.skip("the cpu device has one family")
    since, until = dispatch.RUNS_ON[request.param]
    if dispatch.architecture() is not None and not since <= dispatch.architecture() <= until:
        pytest.skip(f"needs a GPU that runs {request.param}")
    with dispatch.forced(f"gemm={request.param}"):
        yield request.param


def check_bits(rng, dtype, counts, n, k):
    """Every row has the bits of linear of that row alone, every expert's dw those of linear_backward_weight.

    Also where the experts come in another order, so that their rows stand elsewhere, and whatever another expert has:
    one more is all NaN.
    """
    xp, experts = device.xp(), len(counts)
    weights = [*matrix(rng, (experts, n, k), dtype), np.full((n, k), np.nan, device.dtype(dtype))]
    counts = [*counts, 3]
    x, dy = ([matrix(rng, (count, width), dtype) for count in counts] for width in (k, n))
    x[-1][...] = dy[-1][...] = np.nan
    found = []
    for order in (np.arange(experts + 1), rng.permutation(experts + 1)):
        bounds = starts_of([counts[e] for e in order])
        some_x, some_dy = (device.asarray(np.concatenate([parts[e] for e in order])) for parts in (x, dy))
        some_weights, starts = device.asarray(np.stack([weights[e] for e in order])), device.asarray(bounds)
        out, dx = xp.full(some_dy.shape, np.nan, some_x.dtype), xp.full(some_x.shape, np.nan, some_x.dtype)
        dw = xp.ones(some_weights.shape, np.float32)
        grouped_gemm(some_x, some_weights, starts, out)
        grouped_gemm_dx(some_dy, some_weights, starts, dx)
        grouped_gemm_dw(some_dy, some_x, starts, dw)
        places = [order.tolist().index(e) for e in range(experts)]
        found.append([(out[bounds[i] : bounds[i + 1]], dx[bounds[i] : bounds[i + 1]], dw[i]) for i in places])
    for expert, (first, second) in enumerate(zip(*found, strict=True)):
        for one, other, what in zip(first, second, ("out", "dx", "dw"), strict=True):
            assert_same_bits(one, other, f"{what} of expert {expert} in another order")
        own_x, own_dy, weight = map(device.asarray, (x[expert], dy[expert], weights[expert]))
        own_dw = xp.ones((n, k), np.float32)
        linear_backward_weight(own_dy, own_x, own_dw)
        assert_same_bits(first[2], own_dw, f"dw of expert {expert}")
        for row in (counts[expert] - 1,) if counts[expert] else ():
            alone, dx_alone = xp.full((1, n), np.nan, own_x.dtype), xp.full((1, k), np.nan, own_x.dtype)
            linear(own_x[row : row + 1], weight, alone)
            linear_backward_input(own_dy[row : row + 1], weight, dx_alone)
            assert_same_bits(first[0][row : row + 1], alone, f"row {row} of expert {expert}")
            assert_same_bits(first[1][row : row + 1], dx_alone, f"dx of row {row} of expert {expert}")


@pytest.mark.sim
@pytest.mark.parametrize("family, dtype", FAMILY_DTYPES, indirect=["family"])
def test_a_row_depends_on_its_expert_alone(rng, family, dtype):
    check_bits(rng, dtype, *FAMILY_CASES[family])


def test_a_row_depends_on_its_expert_alone_on_the_cpu(rng):
    if device.name() != "cpu":
        pytest.skip("checks the cpu device")
    check_bits(rng, "float32", (1, 0, 70, 3), 48, 40)


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, weights, starts = xp.zeros((2, 8), np.float32), xp.zeros((3, 4, 8), np.float32), xp.zeros(3, np.int32)
    out = xp.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"grouped_gemm: starts must be \(4\) int32, got \(3,\) int32"):
        grouped_gemm(x, weights, starts, out)
    with pytest.raises(ValueError, match=r"grouped_gemm: weights must be \(any, any, 8\) float32"):
        grouped_gemm(x, weights[:, :, :4].copy(), starts, out)
    odd = xp.zeros((3, 5, 8), np.float32)
    with pytest.raises(ValueError, match="grouped_gemm_swiglu: weights must have an even number of rows each, got 5"):
        grouped_gemm_swiglu(x, odd, xp.zeros(4, np.int32), out, out)
    with pytest.raises(ValueError, match=r"grouped_gemm_dx: out must be \(2, 8\) float32"):
        grouped_gemm_dx(out, weights, xp.zeros(4, np.int32), out)
    with pytest.raises(ValueError, match=r"grouped_gemm_dw: x must be \(2, any\) float32"):
        grouped_gemm_dw(out, x[:1], starts, weights)


# Qwen3-30B-A3B's gate-up, on GPUs whose blocks may have this much shared memory; dw is added.
SM80_GPUS = [((8, 0), 163 * 1024), ((12, 0), 99 * 1024)]


@pytest.mark.parametrize("architecture, limit", SM80_GPUS, ids=str)
def test_sm80_kernels_compile_for_gpus(compile_offline, architecture, limit):
    """The largest tiles, whose registers are the scarcest, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    n, k, experts, rows = 1536, 2048, 128, 131_072
    forward = best_sm80_config(rows, experts, n, k, "bfloat16", False, 108, limit)
    backward = best_sm80_config(rows, experts, k, n, "bfloat16", True, 108, limit)
    dw = best_sm80_dw_config(rows, experts, n, k, "bfloat16", "add", 108, limit)
    flat, cube, starts, size = "uint16[:,::1]", "uint16[:,:,::1]", "int32[::1]", "int64"
    troubles = []
    for config in (forward, backward):
        types = [flat, cube, starts, flat, "int32[::1]", size, size]
        troubles += compile_offline(grouped_gemm_sm80_kernel(config), types, architecture)
    types = [flat, flat, starts, "float32[:,:,::1]", "int32[::1]", size, size]
    troubles += compile_offline(grouped_gemm_dw_sm80_kernel(dw), types, architecture)
    assert not troubles, "\n".join(troubles)
