import numpy as np
import pytest

from rlnumba.kernels.optim.adamw import adamw_ref, adamw_scalars
from rlnumba.kernels.optim.adamw_8bit import (
    BLOCK,
    ZERO_CODES,
    Codes,
    Moments,
    adamw_8bit,
    adamw_8bit_kernel,
    adamw_8bit_ref,
    dequantize_ref,
    dynamic_code,
    midpoints,
    quantize_ref,
)
from rlnumba.kernels.optim.stochastic_rounding import rounding_noise
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_close, assert_same_bits

SIZES = [0, 4, BLOCK - 4, BLOCK, BLOCK + 128, 8 * BLOCK + 4]
HYPER = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.1}


def zero_codes(size):
    return tuple(device.xp().full(size, ZERO_CODES[name], np.uint8) for name in "mv")


def gradients(rng, size):
    """Over seven decades, blocks of different sizes, one of zeros."""
    grads = rng.standard_normal(size, np.float32) * np.float32(10.0) ** rng.integers(-7, 1, size).astype(np.float32)
    grads *= np.repeat(np.float32(10.0) ** rng.integers(-3, 4, size // BLOCK + 1), BLOCK)[:size].astype(np.float32)
    if size > BLOCK:
        grads[:BLOCK] = 0
    return grads


def run_steps(rng, size, dtype, with_master=True, steps=3):
    decay_end = size * 2 // 3
    start = rng.standard_normal(size, np.float32).astype(device.dtype(dtype))
    weights = device.asarray(start.copy())
    master = device.asarray(start.astype(np.float32)) if dtype != "float32" and with_master else None
    m, v = zero_codes(size)
    m_absmax, v_absmax = (device.xp().zeros(-(-size // BLOCK), np.float32) for _ in range(2))
    decays, p = np.arange(size) < decay_end, start.astype(np.float32)
    for step in range(1, steps + 1):
        grads = gradients(rng, size)
        scalars = adamw_scalars(**HYPER, step=step, grad_scale=0.5)
        noise = None if dtype == "float32" else device.asarray(rounding_noise(0, step))
        before = [device.to_host(array).copy() for array in (m, v, m_absmax, v_absmax)]
        state = Moments(m, v, m_absmax, v_absmax)
        adamw_8bit(weights, master, device.asarray(grads), state, device.asarray(scalars), decay_end, noise)
        expected = adamw_8bit_ref(p, grads, *before, scalars, decays)
        for what, actual, wanted in zip(("m", "v"), (m, v), expected[1:3], strict=True):
            if device.name() == "cuda":
                # A fused multiply-add rounds once: a number at a midpoint may be kept as the neighbouring code.
                difference = np.abs(device.to_host(actual).astype(int) - wanted)
                assert difference.max(initial=0) <= 1 and difference.sum() <= 1 + difference.size // 1000, what
            else:
                assert_same_bits(actual, wanted, what)
        assert_close(m_absmax, expected[3], terms=4, what="m_absmax")
        assert_close(v_absmax, expected[4], terms=4, what="v_absmax")
        if dtype == "float32" or with_master:
            updated = weights if master is None else master
            moments = [a.astype(np.float64) for a in before[2:]]
            decoded = dequantize_ref(before[0], moments[0], True), dequantize_ref(before[1], moments[1], False)
            scalars64, p64 = scalars.astype(np.float64), p.astype(np.float64)
            exact, _, _ = adamw_ref(p64, grads.astype(np.float64), *decoded, scalars64, decays)
            assert_close(updated, exact, terms=4, what="master")
            assert_same_bits(weights, device.to_host(updated).astype(start.dtype), "weights")
            p = device.to_host(updated).copy()
        else:
            # Rounded to one of the two neighbours in bfloat16, of which the nearer is at most half a spacing away.
            found = device.to_host(weights).astype(np.float32)
            assert (np.abs(found - expected[0]) <= 2.0**-7 * np.abs(expected[0]) + 1e-30).all()
            p = found


def test_codes_are_those_of_the_paper():
    """Appendix of the paper: 127 positive numbers, their negatives, 0 and 1; the extremes computed by hand."""
    signed, unsigned = dynamic_code(True), dynamic_code(False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    np.testing.assert_array_equal(signed[:127], -signed[128:255][::-1])
    assert signed[127] == unsigned[0] == 0 and signed[255] == unsigned[255] == 1
    assert_close(signed[128:132], [0.55e-6, 0.325e-5, 0.775e-5, 0.2125e-4])
    assert_close(signed[254:255], [1 - 0.45 / 64])
    assert_close(unsigned[[1, 2, 254]], [0.325e-6, 0.775e-6, 1 - 0.45 / 128])


def test_quantization_takes_the_nearest_code(rng):
    for signed in (True, False):
        code = dynamic_code(signed)
        values = rng.uniform(-1 if signed else 0, 1, 4 * BLOCK).astype(np.float32)
        values[::BLOCK] = 1
        codes, absmax = quantize_ref(values, signed)
        assert (absmax == 1).all()
        distance = np.abs(values[:, None].astype(np.float64) - code)
        np.testing.assert_allclose(distance[np.arange(len(values)), codes], distance.min(axis=1), rtol=1e-5, atol=1e-9)
        # A code stands for itself.
        again = np.concatenate([code, code]) * np.float32(3)
        np.testing.assert_array_equal(quantize_ref(again, signed)[0], [*range(256)] * 2)
        assert np.isinf(midpoints(code)[-1]) and (np.diff(midpoints(code)) > 0).all()


def test_a_positive_second_moment_is_never_0():
    values = np.array([1.0, 1e-9, 0.0] + [0.0] * 253, np.float32)
    codes, _ = quantize_ref(values, False)
    assert codes[:3].tolist() == [255, 1, 0]


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for size in SIZES if dtype == "float32" else [BLOCK + 72]:
        run_steps(rng, size, dtype, steps=2)


def run_nan_moments():
    """They have no code, and take that of 0; their weights become NaN, those of other blocks do not."""
    size = 2 * BLOCK
    m, v = zero_codes(size)
    m_absmax, v_absmax = (device.asarray(np.array([np.nan, 0], np.float32)) for _ in range(2))
    m[:4] = v[:4] = 255
    weights, grads = device.xp().ones(size, np.float32), device.xp().zeros(size, np.float32)
    scalars = device.asarray(adamw_scalars(**HYPER, step=1))
    adamw_8bit(weights, None, grads, Moments(m, v, m_absmax, v_absmax), scalars, size)
    assert np.isnan(device.to_host(weights)[:4]).all() and np.isfinite(device.to_host(weights)[BLOCK:]).all()
    for name, codes in (("m", m), ("v", v)):
        assert (device.to_host(codes) == ZERO_CODES[name]).all(), name


@pytest.mark.sim
def test_simulator_with_nan_moments():
    run_nan_moments()


def test_cpu_device_with_nan_moments():
    if device.name() != "cpu":
        pytest.skip("the loops of the cpu device")
    run_nan_moments()


@pytest.mark.sim
def test_simulator_without_a_master(rng):
    run_steps(rng, BLOCK + 72, "bfloat16", with_master=False, steps=2)


@pytest.mark.parametrize("dtype, with_master", [("float32", True), ("bfloat16", True), ("bfloat16", False)])
@pytest.mark.parametrize("size", SIZES + [40_000])
def test_cpu_device(rng, size, dtype, with_master):
    if device.name() != "cpu":
        pytest.skip("the loops of the cpu device")
    run_steps(rng, size, dtype, with_master)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, with_master", [("float32", True), ("bfloat16", True), ("bfloat16", False)])
@pytest.mark.parametrize("size", SIZES + [10_000_000])
def test_gpu(rng, size, dtype, with_master):
    run_steps(rng, size, dtype, with_master)


@pytest.mark.parametrize("weights, has_master", [("float32", False), ("uint16", True), ("uint16", False)])
def test_kernel_compiles_for_gpus(compile_offline, weights, has_master):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    f32, i32, troubles = "float32[::1]", "int32[::1]", []
    types = [
        f"{weights}[::1]",
        f32 if has_master else f"{weights}[::1]",
        f32,
        tuple_type(Moments, i32, i32, f32, f32),
        tuple_type(Codes, "float32[:,::1]", "uint8[::1]"),
    ]
    types += [f32, "int64", "uint32[::1]", "int64"]
    kernel = adamw_8bit_kernel(4, True, has_master, weights != "float32" and not has_master)
    for architecture in ((8, 0), (9, 0), (10, 0)):
        troubles += compile_offline(kernel, types, architecture)
    assert not troubles, "\n".join(troubles)


def test_parts_give_the_bits_of_the_whole(rng):
    """Streaming takes the elements in parts: their noise and their blocks are those of the whole array."""
    size, cut = 3 * BLOCK + 128, BLOCK
    start, grads = rng.standard_normal(size, np.float32), device.asarray(gradients(rng, size))
    scalars = device.asarray(adamw_scalars(**HYPER, step=1))
    noise = device.asarray(rounding_noise(7, 1))
    results = []
    for slices in ([slice(0, size)], [slice(0, cut), slice(cut, size)]):
        weights = device.asarray(start.astype(device.dtype("bfloat16")))
        m, v = zero_codes(size)
        absmax = [device.xp().zeros(4, np.float32) for _ in range(2)]
        for part in slices:
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            of_blocks = [array[blocks] for array in absmax]
            decay_end = min(max(500 - part.start, 0), part.stop - part.start)
            state = Moments(m[part], v[part], *of_blocks)
            adamw_8bit(weights[part], None, grads[part], state, scalars, decay_end, noise, part.start)
        results.append([weights, m, v, *absmax])
    for whole, parts in zip(*results, strict=True):
        assert_same_bits(parts, whole)


@pytest.mark.sim
@pytest.mark.parametrize("with_master", [True, False])
def test_gradients_of_16_bits(rng, with_master):
    """The bits of the same numbers in float32; nothing is written where the sum of squares is not finite."""
    size, results = BLOCK + 128, []
    start = rng.standard_normal(size, np.float32).astype(device.dtype("bfloat16"))
    grads = gradients(rng, size).astype(start.dtype)
    noise = device.asarray(rounding_noise(7, 1))
    for values, squares in ((grads, 0.0), (grads.astype(np.float32), 1.0), (grads, np.inf), (grads, np.nan)):
        scalars = adamw_scalars(**HYPER, step=1)
        scalars[8] = squares
        weights = device.asarray(start.copy())
        master = device.asarray(start.astype(np.float32)) if with_master else None
        state = Moments(*zero_codes(size), *(device.xp().zeros(2, np.float32) for _ in range(2)))
        adamw_8bit(weights, master, device.asarray(values), state, device.asarray(scalars), size, noise)
        results.append([weights, *state])
    for narrow, wide in zip(*results[:2], strict=True):
        assert_same_bits(narrow, wide)
    assert (device.to_host(results[0][0]) != start).any()
    for weights, *state in results[2:]:
        assert_same_bits(weights, start)
        assert not device.to_host(state[2]).any() and not device.to_host(state[3]).any()


def test_wrong_arguments_are_named():
    xp = device.xp()
    f32, codes, scale = xp.zeros(8, np.float32), xp.zeros(8, np.uint8), xp.zeros(1, np.float32)
    scalars = xp.zeros(9, np.float32)
    with pytest.raises(ValueError, match=r"adamw_8bit: m must be \(8\) uint8, got \(8,\) float32"):
        adamw_8bit(f32, None, f32, Moments(f32, codes, scale, scale), scalars, 0)
    with pytest.raises(ValueError, match=r"adamw_8bit: v_absmax must be \(1\) float32, got \(8,\) float32"):
        adamw_8bit(f32, None, f32, Moments(codes, codes, scale, f32), scalars, 0)
    with pytest.raises(ValueError, match=r"adamw_8bit: first_element must be a multiple of 256, got 4"):
        adamw_8bit(f32, None, f32, Moments(codes, codes, scale, scale), scalars, 0, first_element=4)
    with pytest.raises(ValueError, match=r"adamw_8bit: the number of elements must be a multiple of 4, got 7"):
        adamw_8bit(f32[:7], None, f32[:7], Moments(codes[:7], codes[:7], scale, scale), scalars, 0)
