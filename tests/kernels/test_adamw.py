import numpy as np
import pytest

from rlnumba.kernels.optim.adamw import adamw, adamw_kernel, adamw_ref, adamw_scalars, clip
from rlnumba.kernels.optim.stochastic_rounding import (
    round_on_cpu,
    rounding_noise,
    stochastic_bfloat16,
    stochastic_bfloat16_ref,
)
from rlnumba.kernels.philox import philox_ref
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch
from tests.close import ROUNDING, assert_close, assert_same_bits

SIZES = [0, 1, 1023, 1024, 1028]
HYPER = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1}


def run_steps(rng, size, dtype, steps=3):
    decay_end = size * 2 // 3
    start = rng.standard_normal(size, np.float32).astype(device.dtype(dtype))
    weights = device.asarray(start.copy())
    master = None if dtype == "float32" else device.asarray(start.astype(np.float32))
    m, v = (device.xp().zeros(size, np.float32) for _ in range(2))
    p, m64, v64 = start.astype(np.float64), np.zeros(size), np.zeros(size)
    decays = np.arange(size) < decay_end
    for step in range(1, steps + 1):
        grads = rng.standard_normal(size, np.float32)
        scalars = adamw_scalars(**HYPER, step=step, grad_scale=0.5)
        adamw(weights, master, device.asarray(grads), (m, v), device.asarray(scalars), decay_end)
        p, m64, v64 = adamw_ref(p, grads.astype(np.float64), m64, v64, scalars.astype(np.float64), decays)
    assert_close(m, m64, terms=steps, what="m")
    assert_close(v, v64, terms=steps, what="v")
    updated = weights if master is None else master
    assert_close(updated, p, terms=steps, what="master")
    assert_same_bits(weights, device.to_host(updated).astype(start.dtype), "weights")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for size in SIZES if dtype == "float32" else [1024, 72]:
        run_steps(rng, size, dtype)


def clipped(total, max_norm):
    """The scalars that `clip` writes."""
    scalars = device.asarray(np.zeros(9, np.float32))
    clip(device.asarray(np.float32([total])), max_norm, scalars)
    return device.to_host(scalars)[7:]


def check_clip():
    for total in (0.0, 1e-13, 0.25, 7.3, 3e38):
        for max_norm in (0.1, 1.0, 1e-6):
            expected = min(1.0, max_norm / (float(np.float32(total)) ** 0.5 + 1e-6))
            scale, squares = clipped(total, max_norm)
            assert_close(scale, expected, terms=4, what=f"{total} {max_norm}")
            assert squares == np.float32(total)
        assert_same_bits(clipped(total, 0.0), np.float32([1, total]))
    for total in (np.inf, np.nan):
        assert_same_bits(clipped(total, 1.0)[1:], np.float32([total]))


@pytest.mark.sim
def test_clip_in_the_simulator():
    check_clip()


def test_clip():
    check_clip()


@pytest.mark.parametrize("weights", ["uint16[::1]", None])
def test_kernel_compiles_for_gpus(compile_offline, weights):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    f32, troubles = "float32[::1]", []
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        types = [weights or f32, f32, f32, f32, f32, f32, "int64", "uint32[::1]", "int64"]
        troubles += compile_offline(adamw_kernel(4, False, weights is not None), types, architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES + [40_000])
def test_numpy_device(rng, size, dtype):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run_steps(rng, size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES + [10_000_001, 10_000_000])
def test_gpu(rng, size, dtype):
    run_steps(rng, size, dtype)


def test_golden_number():
    """p = 1 and two gradients of 0.5, computed from the formula in float64."""
    weights, grads = device.asarray(np.ones(1, np.float32)), device.asarray(np.full(1, 0.5, np.float32))
    m, v = (device.xp().zeros(1, np.float32) for _ in range(2))
    for step in (1, 2):
        scalars = adamw_scalars(**{**HYPER, "weight_decay": 0.01}, step=step)
        adamw(weights, None, grads, (m, v), device.asarray(scalars), 1)
    assert abs(float(device.to_host(weights)[0]) - 0.9979800101) <= 2 * ROUNDING["float32"]


def test_wrong_arguments_are_named():
    xp = device.xp()
    grads, *moments = [xp.zeros(4, np.float32) for _ in range(3)]
    scalars = xp.zeros(9, np.float32)
    with pytest.raises(ValueError, match=r"adamw: weights must be \(any\) float32, got \(4,\) float16"):
        adamw(xp.zeros(4, np.float16), None, grads, moments, scalars, 0)
    with pytest.raises(ValueError, match=r"adamw: master must be \(4\) float32, got \(3,\) float32"):
        adamw(xp.zeros(4, np.float16), xp.zeros(3, np.float32), grads, moments, scalars, 0)
    with pytest.raises(ValueError, match=r"adamw: decay_end must be in \[0, 4\], got 5"):
        adamw(xp.zeros(4, np.float32), None, grads, moments, scalars, 5)


def run_rounded_steps(rng, size, with_master, steps=3):
    """bfloat16 moments, and weights with or without a master: what is kept is a neighbour, chosen by the noise."""
    decay_end, bfloat16 = size * 2 // 3, device.dtype("bfloat16")
    start = rng.standard_normal(size, np.float32).astype(bfloat16)
    weights = device.asarray(start.copy())
    master = device.asarray(start.astype(np.float32)) if with_master else None
    m, v = (device.asarray(np.zeros(size, bfloat16)) for _ in range(2))
    p, decays = start.astype(np.float32), np.arange(size) < decay_end
    for step in range(1, steps + 1):
        grads = rng.standard_normal(size, np.float32)
        scalars = adamw_scalars(**HYPER, step=step, grad_scale=0.5)
        noise = rounding_noise(5, step)
        before = [device.to_host(array).astype(np.float32) for array in (m, v)]
        adamw(
            weights, master, device.asarray(grads), (m, v), device.asarray(scalars), decay_end, device.asarray(noise), 8
        )  # fmt: skip
        exact = adamw_ref(p, grads, *before, scalars, decays)
        groups = np.arange(size) // 4 + 2
        zeros, words = np.zeros_like(groups), []
        for stream in (0, 1):
            counter = np.stack([groups, zeros, zeros + step, zeros + stream], axis=-1)
            words.append(philox_ref(counter, noise[:2])[np.arange(size), np.arange(size) % 4])
        for what, actual, value, random in (
            ("m", m, exact[1], words[0] & 0xFFFF),
            ("v", v, exact[2], words[0] >> 16),
            ("weights", weights, exact[0], words[1] & 0xFFFF),
        ):
            if what == "weights" and with_master:
                assert_close(master, exact[0], terms=3, what="master")
                assert_same_bits(weights, device.to_host(master).astype(bfloat16), "weights")
                continue
            found, expected = device.to_host(actual).astype(np.float64), stochastic_bfloat16_ref(value, random)
            # A last bit of the float32 result, as of a fused multiply-add, may move the choice between two neighbours.
            allowed = 0 if what != "weights" and device.name() != "cuda" else 1 + size // 1000
            assert np.sum(found != expected) <= allowed, what
            # Where the terms of m cancel, its float32 error is larger than its last bit.
            assert (np.abs(found - value) <= 2.0**-7 * np.abs(value) + 1e-6).all(), what
        p = device.to_host(weights if master is None else master).astype(np.float32)


@pytest.mark.sim
@pytest.mark.parametrize("kind, with_master", [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_gradients_of_16_bits(rng, kind, with_master):
    """The bits of the same numbers in float32; nothing is written where the sum of squares is not finite."""
    size, results = 1028, []
    start = rng.standard_normal(size, np.float32).astype(device.dtype("bfloat16"))
    grads = rng.standard_normal(size, np.float32).astype(start.dtype)
    noise = device.asarray(rounding_noise(7, 1)) if kind == "bfloat16" else None
    for values, squares in ((grads, 0.0), (grads.astype(np.float32), 1.0), (grads, np.inf), (grads, np.nan)):
        scalars = adamw_scalars(**HYPER, step=1)
        scalars[8] = squares
        weights = device.asarray(start.copy())
        master = device.asarray(start.astype(np.float32)) if with_master else None
        m, v = (device.xp().zeros(size, device.dtype(kind)) for _ in range(2))
        adamw(weights, master, device.asarray(values), (m, v), device.asarray(scalars), size, noise)
        results.append([weights, m, v])
    for narrow, wide in zip(*results[:2], strict=True):
        assert_same_bits(narrow, wide)
    assert (device.to_host(results[0][0]) != start).any()
    for weights, m, v in results[2:]:
        assert_same_bits(weights, start)
        assert not device.to_host(m).any() and not device.to_host(v).any()


def run_step_of_nans():
    """Whatever its bits are, a NaN of a weight without a gradient, or of a damaged checkpoint's moment, stays one."""
    bfloat16 = device.dtype("bfloat16")
    nans = np.array([0x7FFF, 0xFFFF, 0x7FC0, 0xFFC0], np.uint16).view(bfloat16)
    for damaged in range(3):
        arrays = [np.zeros(8, bfloat16) for _ in range(3)]
        arrays[damaged][:4] = nans
        weights, m, v = map(device.asarray, arrays)
        scalars = device.asarray(adamw_scalars(**HYPER, step=1))
        grads, noise = device.asarray(np.zeros(8, np.float32)), device.asarray(rounding_noise(7, 1))
        adamw(weights, None, grads, (m, v), scalars, 8, noise)
        weights, m, v = (device.to_host(x).astype(np.float32) for x in (weights, m, v))
        assert np.isnan((weights, m, v)[damaged][:4]).all() and np.isnan(weights[:4]).all()
        assert not np.isnan([weights[4:], m[4:], v[4:]]).any()


@pytest.mark.sim
def test_a_nan_is_not_rounded_away():
    run_step_of_nans()


def test_cpu_device_does_not_round_a_nan_away():
    if device.name() != "cpu":
        pytest.skip("the loops of the cpu device")
    run_step_of_nans()
    values = np.array([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000], np.int64).astype(np.int32).view(np.float32)
    rounded = np.zeros(4, device.dtype("bfloat16"))
    round_on_cpu(values, rounded, rounding_noise(3, 1), 0, 0, 0)
    np.testing.assert_array_equal(rounded.astype(np.float32), np.float32([np.nan, np.nan, np.nan, np.inf]))


@cuda.jit
def round_kernel(x, words, out):
    i = cuda.grid(1)
    out[i] = stochastic_bfloat16(x[i] + np.float32(1.0), words[i], 0)


@pytest.mark.sim
def test_rounding_infinities_and_nans():
    """Infinities stay, the largest numbers may become infinite, and no sum of NaN's bits and noise becomes a number."""
    if device.name() == "cpu":
        pytest.skip("a kernel")
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, np.finfo(np.float32).max, 0, 0, 0], np.float32)
    out = device.xp().zeros(8, np.float32)
    launch(round_kernel, 1, 8, device.asarray(x), device.asarray(np.full(8, 0xFFFF, np.uint32)), out)
    expected = np.array([np.inf, -np.inf, np.nan, np.nan, np.inf, 1, 1, 1], np.float32)
    np.testing.assert_array_equal(device.to_host(out), expected)


@pytest.mark.sim
@pytest.mark.parametrize("with_master", [True, False])
def test_simulator_with_stochastic_rounding(rng, with_master):
    for size in (0, 3, 72):
        run_rounded_steps(rng, size, with_master, steps=2)


@pytest.mark.parametrize("with_master", [True, False])
@pytest.mark.parametrize("size", [0, 3, 4, 1028, 40_000])
def test_cpu_device_with_stochastic_rounding(rng, size, with_master):
    if device.name() != "cpu":
        pytest.skip("the loops of the cpu device")
    run_rounded_steps(rng, size, with_master)


@pytest.mark.gpu
@pytest.mark.parametrize("with_master", [True, False])
@pytest.mark.parametrize("size", [3, 1028, 10_000_000])
def test_gpu_with_stochastic_rounding(rng, size, with_master):
    run_rounded_steps(rng, size, with_master)


@pytest.mark.parametrize("has_master", [True, False])
def test_kernels_that_round_compile_for_gpus(compile_offline, has_master):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    f32, u16, troubles = "float32[::1]", "uint16[::1]", []
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        types = [u16, f32 if has_master else u16, f32, u16, u16, f32, "int64", "uint32[::1]", "int64"]
        troubles += compile_offline(adamw_kernel(4, False, has_master, True, not has_master), types, architecture)
    assert not troubles, "\n".join(troubles)


def test_stochastic_rounding_is_unbiased():
    """Every 16-bit number of the noise once: the mean is the number itself, up to what 16 bits resolve."""
    random = np.arange(65536)
    for value in (1.0 + 2.0**-9, -3.1415927, 1e-40, 65504.1, 0.0):
        value = np.float32(value)
        rounded = stochastic_bfloat16_ref(np.full(65536, value), random)
        spacing = rounded.max() - rounded.min()
        assert abs(rounded.mean() - float(value)) <= spacing * 2.0**-16
        assert len(set(rounded)) == (1 if value == 0 else 2)
        found = np.empty(8, device.DTYPES["bfloat16"])
        round_on_cpu(np.full(8, value), found, rounding_noise(3, 1), 0, 0, 0)
        assert set(found.astype(np.float64)) <= set(rounded)
