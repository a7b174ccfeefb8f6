import numpy as np
import pytest

from rlnumba.kernels.nn import rmsnorm as rmsnorm_module
from rlnumba.kernels.nn.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_backward_ref, rmsnorm_ref
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits

EPS = 1e-6
SMALL = [(1, 1), (3, 48), (9, 129), (0, 8)]
REAL = [(4096, 1024), (1, 4096), (513, 4096), (300, 8192), (4097, 1000), (5, 16384), (0, 1024)]


def arrays(rng, shape, dtype):
    x, dout, residual = (rng.standard_normal(shape).astype(device.dtype(dtype)) for _ in range(3))
    weight = rng.uniform(0.5, 1.5, shape[1]).astype(device.dtype(dtype))
    return x, dout, residual, weight


def run_all(rng, shape, dtype, unit_offset=False):
    x, dout, residual, weight = arrays(rng, shape, dtype)
    wide = [a.astype(np.float64) for a in (x, dout, residual, weight)]
    wide[3] += unit_offset
    xd, dd, wd = (device.asarray(a.copy()) for a in (x, dout, weight))
    xp, columns = device.xp(), shape[1]
    out, rstd = xp.full(shape, np.nan, x.dtype), xp.full(shape[:1], np.nan, np.float32)
    rmsnorm(xd, wd, EPS, out, rstd, unit_offset)
    expected, expected_rstd = rmsnorm_ref(wide[0], wide[3], EPS)
    assert_close(out, expected, terms=columns, what="out")
    assert_close(rstd, expected_rstd, terms=columns, what="rstd")

    dx = device.asarray(residual.copy())
    dweight = xp.ones(columns, np.float32)
    rmsnorm_backward(dd, xd, wd, rstd, dx, dweight, accumulate=True, unit_offset=unit_offset)
    expected_dx, expected_dw = rmsnorm_backward_ref(wide[1], wide[0], wide[3], expected_rstd)
    # dx cancels (entirely when D = 1), so its error is that of its terms.
    size = np.max(np.abs(wide[1] * wide[3] * expected_rstd[:, None]), initial=0.0)
    assert_close(dx, expected_dx + wide[2], terms=columns, scale=size + 3, what="dx accumulated")
    assert_close(dweight, expected_dw + 1, terms=shape[0] + 1, scale=np.sqrt(shape[0]) + 3, what="dweight")
    dx.fill(np.nan)
    rmsnorm_backward(dd, xd, wd, rstd, dx, dweight, unit_offset=unit_offset)
    assert_close(dx, expected_dx, terms=columns, scale=size, what="dx")


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


@pytest.mark.parametrize("dtype,columns", [("float16", 256), ("bfloat16", 130)])
@pytest.mark.sim
def test_simulator_16_bit(rng, monkeypatch, dtype, columns):
    # As if these were many rows: several of them share a block.
    monkeypatch.setattr(rmsnorm_module, "FEW_ROWS", 0)
    run_all(rng, (5, columns), dtype)


@pytest.mark.sim
@pytest.mark.parametrize("rows", [1, 255, 640, 641])
def test_partial_rows_are_added(rng, rows):
    """By warps that load several rows at a time: fewer than they could, and more than once."""
    partials, total = rng.standard_normal((rows, 33), np.float32), device.xp().ones(33, np.float32)
    expected = partials.astype(np.float64).sum(axis=0) + 1
    rmsnorm_module.add_partials(device.asarray(partials), total)
    assert_close(total, expected, terms=rows + 1, scale=np.sqrt(rows) + 3)


@pytest.mark.sim
@pytest.mark.parametrize(
    "columns,dtype", [(1024, "bfloat16"), (2560, "float16"), (4096, "float32"), (8192, "bfloat16")]
)
def test_simulator_real_rows(rng, columns, dtype):
    x, _, _, weight = arrays(rng, (2, columns), dtype)
    out, rstd = device.xp().empty(x.shape, x.dtype), device.xp().empty(2, np.float32)
    rmsnorm(device.asarray(x), device.asarray(weight), EPS, out, rstd)
    expected, expected_rstd = rmsnorm_ref(x.astype(np.float64), weight.astype(np.float64), EPS)
    assert_close(out, expected, terms=columns, what="out")
    assert_close(rstd, expected_rstd, terms=columns, what="rstd")


@pytest.mark.sim
def test_many_wide_rows(rng, monkeypatch):
    """Rows of two warps, more of them than FEW_ROWS."""
    monkeypatch.setattr(rmsnorm_module, "FEW_ROWS", 0)
    run_all(rng, (3, 600), "float32")


@pytest.mark.sim
def test_unit_offset_in_the_simulator(rng):
    run_all(rng, (3, 48), "bfloat16", True)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("shape", SMALL + [(64, 1024)])
def test_numpy_device(rng, shape, unit_offset):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run_all(rng, shape, "float32", unit_offset)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype):
    run_all(rng, shape, dtype)
    run_all(rng, shape, dtype, unit_offset=True)


def test_a_row_depends_on_itself_alone(rng):
    rows = 3 if device.name() == "sim" else 65
    check_rows(rng, rows, 96, "float32", range(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 4096])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu_rows(rng, columns, dtype):
    check_rows(rng, 2000, columns, dtype, [0, 1, 512, 1999])


def check_rows(rng, rows, columns, dtype, chosen):
    """Rows alone, and the first half of them, have the bits that they have together."""
    x, _, _, weight = (device.asarray(a) for a in arrays(rng, (rows, columns), dtype))
    xp = device.xp()

    def run(first, last):
        results = [xp.empty_like(x[first:last]), xp.empty(last - first, np.float32)]
        rmsnorm(x[first:last], weight, EPS, *results)
        return results

    together = run(0, rows)
    for first, last in [(row, row + 1) for row in chosen] + [(0, rows // 2)]:
        for alone, whole in zip(run(first, last), together, strict=True):
            assert_same_bits(alone, whole[first:last], f"rows {first} to {last}")


def test_where_arrays_lie_changes_no_bits(rng):
    x, dout, _, weight = arrays(rng, (5, 40), "float32")
    xp = device.xp()
    results = []
    for offset in (0, 1):
        # The second time nothing is aligned to more than an element.
        places = [xp.zeros(offset + a.size, np.float32)[offset:].reshape(a.shape) for a in (x, dout, weight, x, x)]
        for place, array in zip(places, (x, dout, weight), strict=False):
            place[...] = device.asarray(array)
        rstd, dweight = xp.empty(5, np.float32), xp.zeros(40, np.float32)
        xd, dd, wd, out, dx = places
        rmsnorm(xd, wd, EPS, out, rstd)
        rmsnorm_backward(dd, xd, wd, rstd, dx, dweight)
        results.append((out, rstd, dx, dweight))
    for aligned, shifted in zip(*results, strict=True):
        assert_same_bits(aligned, shifted)


def test_backward_repeats_its_bits(rng):
    rows = 5 if device.name() == "sim" else 3000
    x, dout, _, weight = (device.asarray(a) for a in arrays(rng, (rows, 64), "float32"))
    xp = device.xp()
    rstd = xp.ones(rows, np.float32)
    runs = []
    for _ in range(2):
        dx, dweight = xp.empty_like(x), xp.zeros(64, np.float32)
        rmsnorm_backward(dout, x, weight, rstd, dx, dweight)
        runs.append((dx, dweight))
    for first, second in zip(*runs, strict=True):
        assert_same_bits(first, second)


@pytest.mark.sim
def test_simulator_with_several_warps_a_row(rng, monkeypatch):
    """And several chunks, the last one cut off; several rows for each line of a block."""
    for budget in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(rmsnorm_module, budget, (4, 64))
    monkeypatch.setattr(rmsnorm_module, "PROCESSORS", 1)
    run_all(rng, (5, 300), "float32")


@pytest.mark.parametrize("element,columns", [("uint16", 1024), ("float32", 4096), ("float32", 5120), ("uint16", 2560)])
def test_kernels_compile_for_gpus(compile_offline, element, columns):
    """At the shapes of Qwen3, where rows fill the registers."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    itemsize = 2 if element == "uint16" else 4
    forward, backward = (
        rmsnorm_module.share_row(columns, itemsize, 16 // itemsize, *budget)
        for budget in (rmsnorm_module.FORWARD, rmsnorm_module.BACKWARD)
    )
    x, weight, f32 = f"{element}[:,::1]", f"{element}[::1]", "float32[::1]"
    troubles = []
    kernel = rmsnorm_module.rmsnorm_backward_kernel(backward, max(1, 256 // backward.threads), False)
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        for few_rows in (False, True):
            forward_kernel = rmsnorm_module.rmsnorm_kernel(forward, few_rows, False)
            troubles += compile_offline(forward_kernel, [x, weight, "float32", x, f32], architecture)
        troubles += compile_offline(kernel, [x, x, weight, f32, "int64", x, "float32[:,::1]"], architecture)
    assert not troubles, "\n".join(troubles)


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, out, rstd = xp.zeros((2, 8), np.float32), xp.zeros((2, 7), np.float32), xp.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"rmsnorm: out must be \(2, 8\) float32, got \(2, 7\) float32"):
        rmsnorm(x, xp.ones(8, np.float32), EPS, out, rstd)
    with pytest.raises(ValueError, match=r"rmsnorm: weight must be \(8\) float32, got \(8,\) float64"):
        rmsnorm(x, xp.ones(8, np.float64), EPS, x, rstd)
    with pytest.raises(ValueError, match="rmsnorm: rows must have 1 to 16384 columns, got 16385"):
        wide = xp.zeros((1, 16385), np.float32)
        rmsnorm(wide, xp.ones(16385, np.float32), EPS, wide, xp.zeros(1, np.float32))
