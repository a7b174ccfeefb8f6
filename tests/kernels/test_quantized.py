"""Weights of 4 and 8 bits: the published packages' values to the bit, and kernels with the references' bits."""

import numpy as np
import pytest

from rlnumba.kernels.quantized.formats import (
    FORMATS,
    dequantize_ref,
    levels_ref,
    pack_codes,
    pack_scales,
    quantize_ref,
    unpack_codes,
    unpack_scales,
)
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize, quantize
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.trainers.runs import GOLDEN

# Rows, columns and group sizes: within a tile, several tiles, and ragged ones.
SHAPES = [(5, 16, 8), (40, 192, 64), (33, 72, 24), (32, 128, 128)]


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "quantized.npz") as found:
        return dict(found)


def matrix(rng, shape, dtype):
    """Values of a weight, with a row of zeros and an outlier."""
    x = (0.02 * rng.standard_normal(shape)).astype(np.float32)
    x[1], x[0, 3] = 0, 3
    return x.astype(device.dtype(dtype))


def quantized(x, form, group_size):
    """The QuantizedWeight of a matrix, quantised in two parts."""
    weight = QuantizedWeight.empty(form, x.shape, group_size, x.dtype.name)
    for first, part in ((0, x[:3]), (3, x[3:])):
        quantize(device.asarray(part), first, weight)
    return weight


def check_operators(rng, form, shape, group_size, dtype):
    """Both operators have the references' codes, scales and values."""
    x = matrix(rng, shape, dtype)
    codes, scales = quantize_ref(x, form, group_size)
    weight = quantized(x, form, group_size)
    assert_same_bits(device.to_host(weight.packed), pack_codes(codes, form), f"codes of {form.name}")
    assert_same_bits(device.to_host(weight.scales), pack_scales(scales), f"scales of {form.name}")
    out = device.xp().full(shape, np.nan, x.dtype)
    dequantize(weight, out)
    assert_same_bits(out, dequantize_ref(codes, scales, form, x.dtype), f"values of {form.name}")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_packing_is_undone(rng, form):
    codes, scales = rng.integers(0, 1 << form.bits, (40, 72)).astype(np.uint8), rng.random((40, 9), np.float32)
    assert np.array_equal(unpack_codes(pack_codes(codes, form), 40, 72, form), codes)
    assert np.array_equal(unpack_scales(pack_scales(scales), 40), scales)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_errors_are_bounded(rng, form):
    """No value is further from its own than from the next level."""
    x = matrix(rng, (64, 256), "float32")
    codes, scales = quantize_ref(x, form, 64)
    error = np.abs(dequantize_ref(codes, scales, form, np.float32) - x).reshape(64, 4, 64)
    levels = np.sort(levels_ref(form)[np.isfinite(levels_ref(form))])
    # The lowest level of the integers has no counterpart above, and values there are cut.
    widest = max(np.diff(levels).max() / 2, form.largest - levels[-1])
    assert (error <= widest * scales[..., None] * 1.001).all()


def test_nf4_is_that_of_bitsandbytes(golden):
    x = golden["x"].astype(device.dtype("bfloat16"))
    codes, scales = quantize_ref(x, FORMATS["nf4"], 64)
    packed = golden["nf4/packed"].reshape(len(x), -1)
    assert np.array_equal(codes[:, ::2] << 4 | codes[:, 1::2], packed)
    assert_same_bits(scales.reshape(-1), golden["nf4/absmax"])
    values = dequantize_ref(codes, scales, FORMATS["nf4"], x.dtype)
    assert_same_bits(values.astype(np.float32), golden["nf4/values"])


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_others_are_those_of_compressed_tensors(golden, name):
    """In float32 all of it; in bfloat16, in which they round quotients twice, the values of their codes."""
    form = FORMATS[name]
    codes, scales = quantize_ref(golden["x"], form, 128)
    theirs = golden[f"{name}/float32/scale"]
    # A group of zeros has a scale above 0 there.
    assert_same_bits(scales[scales > 0], theirs[scales > 0])
    assert np.array_equal(codes, codes_of(golden[f"{name}/float32/codes"], form))
    for element in ("float32", "bfloat16"):
        codes, scales = codes_of(golden[f"{name}/{element}/codes"], form), golden[f"{name}/{element}/scale"]
        values = dequantize_ref(codes, scales, form, device.dtype(element)).astype(np.float32)
        assert_same_bits(values, golden[f"{name}/{element}/values"])


def codes_of(theirs, form):
    """Codes here of those of compressed-tensors, int8."""
    return theirs.view(np.uint8) if form.name == "fp8" else (theirs + np.int16(1 << form.bits - 1)).astype(np.uint8)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operators(rng, form, shape):
    check_operators(rng, form, shape[:2], shape[2], "float32")


@pytest.mark.sim
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_simulator(rng, form):
    check_operators(rng, form, (5, 72), 24, "bfloat16")
    check_operators(rng, form, (34, 16), 8, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_gpu(rng, form, dtype):
    for shape, group_size in (((1000, 1024), 128), ((4096, 1536), 64), ((33, 72), 24)):
        check_operators(rng, form, shape, group_size, dtype)


def test_a_stack_of_matrices_and_rows_out_of_range(rng):
    x = matrix(rng, (3, 8, 32), "float32")
    weight = QuantizedWeight.empty(FORMATS["int8"], x.shape, 16, "float32")
    quantize(device.asarray(x.reshape(24, 32)), 0, weight)
    out = device.xp().zeros(x.shape, np.float32)
    dequantize(weight, out)
    expected = dequantize_ref(*quantize_ref(x.reshape(24, 32), FORMATS["int8"], 16), FORMATS["int8"], np.float32)
    assert_same_bits(out, expected.reshape(x.shape))
    assert len(weight) == 3 and weight.nbytes == 32 * 64 + 32 * 2 * 4
    with pytest.raises(ValueError, match="quantize: x must end at row 24, got 8 rows from 17 on"):
        quantize(device.asarray(x[0]), 17, weight)
