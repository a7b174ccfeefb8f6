"""The GEMM of few rows by a packed weight: the bits of the 16-bit GEMM on the weight's values."""

import contextlib
import itertools

import numpy as np
import pytest

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm import sm90
from rlnumba.kernels.gemm.reduction import ReducingLowRank, Reduction, reduction_counters
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig
from rlnumba.kernels.quantized import few_rows
from rlnumba.kernels.quantized.few_rows_config import (
    PackedGemmConfig,
    config_in_registers,
    config_of_width,
    has_turns,
    is_possible,
    packed_config,
    with_stages,
)
from rlnumba.kernels.quantized.formats import FORMATS, dequantize_ref, levels_ref, pack_codes, pack_scales
from rlnumba.kernels.quantized.linear import is_packed_gemm, packed_linear, packed_linear_swiglu
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize, quantize
from rlnumba.model.blocks.projection import multiply, multiply_swiglu
from rlnumba.runtime import context, device, dispatch, launch
from rlnumba.runtime.arguments import tuple_type
from rlnumba.runtime.context import Context
from tests.close import assert_same_bits
from tests.kernels.gemm_cases import matrix, random_adapters, reduced

pytestmark = pytest.mark.sm90


def quantized(rng, form, shape, group_size, element):
    """(QuantizedWeight, its values) of a random matrix."""
    x = device.asarray((0.02 * rng.standard_normal(shape)).astype(device.dtype(element)))
    weight, values = QuantizedWeight.empty(FORMATS[form], shape, group_size, element), device.xp().empty_like(x)
    quantize(x, 0, weight)
    dequantize(weight, values)
    return weight, values


def check(rng, config, rows, n, k, adapters=1):
    """gemm_with_config of some numbers of rows has the bits of the 16-bit GEMM."""
    halves = 2 if config.swiglu else 1
    weight, values = quantized(rng, config.form, (halves * n, k), 64 * config.group_tiles, config.element)
    plain = Sm90GemmConfig(
        64, 1, 8, config.element, bias=config.bias, residual=config.residual, swiglu=config.swiglu,
        low_rank=config.low_rank,
    )  # fmt: skip
    for m in rows:
        x, residual = (device.asarray(matrix(rng, shape, config.element)) for shape in ((m, k), (m, n)))
        bias = device.asarray(matrix(rng, n, config.element)) if config.bias else None
        pair = tuple(device.asarray(matrix(rng, (size, 24), config.element)) for size in (m, halves * n))
        low_rank = pair if config.low_rank else None
        found_rank, reduction = low_rank, None
        if config.reduces:
            reduction = random_adapters(rng, adapters, 24 // adapters, k, m, config.element)
            low_rank = reduced(x, reduction), pair[1]
            found_rank = device.xp().full((m, 24), np.nan, x.dtype), pair[1]
        outs = [device.xp().full((m, halves * n), np.nan, x.dtype) for _ in range(2)]
        residuals = [residual.copy() if config.swiglu or config.residual else None for _ in range(2)]
        few_rows.gemm_with_config(config, x, weight, outs[0], bias, residuals[0], found_rank, reduction)
        sm90.gemm_with_config(plain, x, values, outs[1], bias, residuals[1], low_rank)
        assert_same_bits(outs[0], outs[1], f"{m} rows, {config}")
        if config.reduces:
            assert_same_bits(found_rank[0], low_rank[0], f"x A^T, {m} rows, {config}")
        if config.swiglu:
            assert_same_bits(residuals[0], residuals[1], f"activated, {m} rows, {config}")


BF16, F16 = "bfloat16", "float16"
# A config; numbers of rows; N and K: ragged edges, several tiles and more stages than the ring has.
SIMULATED = [
    (PackedGemmConfig("int4", 16, 2, 2, 2, 8, 1, False, BF16), [1, 2, 3], 40, 384),
    (PackedGemmConfig("int4", 32, 2, 2, 3, 8, 2, True, F16, bias=True, residual=True), [4, 5, 8], 40, 512),
    (PackedGemmConfig("int4", 48, 6, 4, 2, 16, 1, False, BF16, low_rank=True), [9, 16], 72, 512),
    (PackedGemmConfig("int8", 16, 2, 2, 2, 8, 2, False, BF16, residual=True, low_rank=True), [6, 7], 40, 256),
    (PackedGemmConfig("int8", 32, 4, 2, 2, 16, 1, True, F16), [10, 11], 40, 256),
    (PackedGemmConfig("int8", 64, 8, 2, 2, 16, 1, True, BF16, swiglu=True, low_rank=True), [12], 64, 128),
    (PackedGemmConfig("fp8", 16, 2, 4, 2, 8, 1, False, F16, bias=True), [8], 24, 512),
    (PackedGemmConfig("fp8", 32, 4, 2, 2, 16, 2, False, BF16, swiglu=True), [13, 14], 48, 256),
    (PackedGemmConfig("nf4", 16, 1, 2, 2, 16, 1, False, BF16, residual=True), [15, 16], 40, 256),
    (PackedGemmConfig("nf4", 32, 4, 2, 2, 8, 1, False, F16, swiglu=True, low_rank=True), [1], 48, 256),
    (PackedGemmConfig("nf4", 16, 2, 2, 2, 32, 2, False, BF16, bias=True), [17, 31], 24, 256),
    (PackedGemmConfig("int4", 16, 1, 2, 2, 64, 1, False, BF16, low_rank=True), [33, 64], 16, 128),
]


# C^T = W A^T: tiles of 64 rows of the weight, and of fewer, of which wgmma reads what lies behind them, too; teams that
# take turns.
SWAPPED = [
    (PackedGemmConfig("int4", 32, 8, 4, 3, 8, 2, True, BF16, residual=True, teams=2), [1, 7], 72, 1536, 1),
    (PackedGemmConfig("int8", 32, 4, 4, 2, 16, 1, False, F16, swiglu=True), [8, 13], 48, 512, 1),
    (PackedGemmConfig("int4", 64, 8, 4, 2, 8, 2, True, BF16, residual=True, bias=True), [1, 7], 72, 512, 1),
    (PackedGemmConfig("nf4", 64, 8, 2, 3, 8, 1, True, F16, swiglu=True, low_rank=True, teams=2), [8], 64, 768, 1),
    (
        PackedGemmConfig("int4", 64, 8, 4, 3, 8, 1, True, BF16, swiglu=True, low_rank=True, reduces=True, teams=2),
        [5],
        64,
        512,
        3,
    ),
    (PackedGemmConfig("fp8", 16, 2, 2, 5, 32, 1, False, BF16, bias=True, low_rank=True, teams=3), [23], 40, 768, 1),
    (PackedGemmConfig("int4", 64, 8, 2, 3, 64, 1, True, BF16, bias=True, teams=2), [40], 72, 512, 1),
]
SWAPPED = [(config._replace(swapped=True), *case) for config, *case in SWAPPED]

# C^T = W A^T by one to three warpgroups that widen in their registers: ragged edges, tiles of 64 rows of the weight and
# of 32 for a warpgroup, one and more panels of a low rank, of a tile of A' one and two a stage.
IN_REGISTERS = [
    (PackedGemmConfig("int4", 64, 0, 2, 3, 8, 1, True, BF16, residual=True, wgmma_steps=1), 1, [1, 7], 72, 768, 1),
    (PackedGemmConfig("int4", 64, 0, 4, 2, 8, 2, True, BF16, bias=True), 2, [8], 96, 768, 1),
    (PackedGemmConfig("int8", 64, 0, 2, 2, 16, 1, True, F16, residual=True, low_rank=True), 1, [13], 72, 384, 1),
    (PackedGemmConfig("int8", 32, 0, 4, 2, 8, 2, True, BF16, wgmma_steps=2), 3, [5], 104, 512, 1),
    (PackedGemmConfig("fp8", 64, 0, 2, 2, 32, 2, True, BF16, swiglu=True, wgmma_steps=2), 2, [23], 96, 256, 1),
    (PackedGemmConfig("nf4", 64, 0, 2, 2, 8, 1, False, F16, swiglu=True, low_rank=True), 1, [8], 48, 256, 1),
    (PackedGemmConfig("nf4", 32, 0, 2, 2, 64, 1, True, BF16, residual=True, wgmma_steps=1), 2, [40], 40, 256, 1),
    (PackedGemmConfig("int4", 64, 0, 4, 2, 8, 1, True, BF16, swiglu=True, reduces=True), 3, [5], 64, 512, 3),
    (PackedGemmConfig("fp8", 32, 0, 2, 3, 16, 1, True, F16, residual=True, reduces=True), 1, [9], 40, 256, 1),
    (PackedGemmConfig("int4", 32, 0, 2, 2, 8, 1, True, BF16, swiglu=True, reduces=True), 2, [6], 96, 256, 1),
    (PackedGemmConfig("int8", 32, 0, 2, 2, 8, 1, False, BF16, swiglu=True, low_rank=True), 1, [3], 48, 256, 1),
]
IN_REGISTERS = [
    (
        config._replace(
            columns=config.columns * warpgroups, swapped=True, warpgroups=warpgroups,
            low_rank=config.low_rank or config.reduces,
        ),
        *case,
    )
    for config, warpgroups, *case in IN_REGISTERS
]  # fmt: skip

# With the first matrix of the low rank computed in the kernel: one tile of it and several, of one adapter and three.
REDUCING = [
    (PackedGemmConfig("int4", 16, 2, 4, 2, 8, 1, False, BF16, residual=True), [3], 40, 512, 3),
    (PackedGemmConfig("int8", 32, 4, 2, 2, 16, 1, True, F16, bias=True), [9], 40, 256, 1),
    (PackedGemmConfig("nf4", 32, 4, 2, 2, 8, 1, False, BF16, swiglu=True), [8], 48, 256, 1),
    (PackedGemmConfig("int4", 16, 1, 2, 2, 64, 1, False, BF16), [40], 16, 256, 3),
]
REDUCING = [(config._replace(low_rank=True, reduces=True), *case) for config, *case in REDUCING]


@pytest.mark.sim
@pytest.mark.parametrize("config, rows, n, k", SIMULATED)
def test_simulator(rng, config, rows, n, k):
    assert is_possible(config)
    check(rng, config, rows, n, k)


@pytest.mark.sim
@pytest.mark.parametrize("config, rows, n, k, adapters", SWAPPED)
def test_the_transposed_product(rng, config, rows, n, k, adapters):
    assert is_possible(config) and has_turns(config, k)
    check(rng, config, rows, n, k, adapters)


@pytest.mark.sim
@pytest.mark.parametrize("config, rows, n, k, adapters", IN_REGISTERS)
def test_warpgroups_that_widen_in_their_registers(rng, config, rows, n, k, adapters):
    assert is_possible(config) and has_turns(config, k)
    check(rng, config, rows, n, k, adapters)


@pytest.mark.sim
@pytest.mark.parametrize("config, rows, n, k, adapters", REDUCING)
def test_the_low_rank_in_the_same_kernel(rng, config, rows, n, k, adapters):
    assert is_possible(config)
    check(rng, config, rows, n, k, adapters)
    assert not device.to_host(context.current().own(reduction_counters)).any()


def test_every_chosen_config_is_possible():
    """Whatever the shape, the warps share the loads evenly and an SM holds the ring."""
    shapes = (
        (24, 128),
        (1024, 2048),
        (6144, 4096),
        (12_288, 4096),
        (4096, 12_288),
        (2560, 9728),
        (9728, 2560),
        (640, 384),
    )
    for m, form, swiglu in itertools.product((1, 8, 9, 17, 64), FORMATS.values(), (False, True)):
        for (n, k), sm_count in itertools.product(shapes, (132, 114)):
            fields = "bfloat16", False, False, swiglu, False
            config = packed_config(m, n, k, form.name, form.group_size, sm_count, fields)
            assert is_possible(config) and m <= config.rows and has_turns(config, k)
            assert config.layout.nbytes <= 227 * 1024 and config.threads <= 1024
            if config.warpgroups:
                assert config.stages >= 2
            else:
                assert config.loads >= 1 and config.stages >= 3


def test_those_who_multiply_widen_where_that_is_faster():
    """Wide tiles of gate and up of any rows, but of one byte a value with few; and other tiles of 64 rows."""

    def warpgroups(m, n, k, form, swiglu=True):
        epilogue = "bfloat16", False, False, swiglu, False
        return packed_config(m, n, k, form, FORMATS[form].group_size, 132, epilogue).warpgroups

    assert [warpgroups(m, 12_288, 4096, "int4") for m in (1, 16, 64)] == [3, 3, 3]
    assert [warpgroups(m, 12_288, 4096, "int8") for m in (1, 16, 64)] == [0, 3, 3]
    assert [warpgroups(m, 3072, 1024, "nf4") for m in (1, 16, 64)] == [0, 0, 1]
    assert [warpgroups(m, 4096, 12_288, "fp8", False) for m in (1, 16, 64)] == [0, 0, 1]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 4096), (4096, 12_288)])
def test_copies_of_a_reduced_tile_that_are_under_way(form, n, k):
    """One block adds up x A^T of 64 rows in a chain of copies: it has as many panels under way as other warps would."""
    config = packed_config(64, n, k, form, FORMATS[form].group_size, 132, ("bfloat16", False, True, False, True))
    assert config.warpgroups == 1 and config.stages * config.reducing_panels >= 10


@pytest.mark.sim
@pytest.mark.parametrize("element", [BF16, F16])
@pytest.mark.parametrize("form", FORMATS)
def test_every_code_is_widened_to_its_value(form, element):
    """Each code at each place of a word, with scales that are small, large and 0."""
    each, dtype = FORMATS[form], device.dtype(element)
    codes = np.arange(1 << each.bits, dtype=np.uint8)
    # Those of no number are of no group.
    codes = codes[np.isfinite(levels_ref(each))]
    values = np.stack([np.resize(np.roll(codes, row), 256) for row in range(32)])
    of_rows = np.resize(np.float32([0.0123, 0, 1e-6, 3.5, 1e-39, 2.0**-14, 7e-7]), 32)
    of_rows = of_rows.astype(np.float32 if form == "nf4" else dtype).astype(np.float32)
    scales = np.repeat(of_rows[:, None], 4, axis=1)
    arrays = (device.asarray(x) for x in (pack_codes(values, each), pack_scales(scales)))
    weight = QuantizedWeight(each, *arrays, (32, 256), dtype)
    expected = dequantize_ref(values, scales, each, dtype)
    config = PackedGemmConfig(form, 32, 4, 2, 2, 64, 1, True, element)
    for first in range(0, 256, 64):
        # Rows of the identity: C has the values.
        x, out = np.zeros((64, 256), dtype), device.xp().empty((64, 32), dtype)
        x[np.arange(64), first + np.arange(64)] = 1
        few_rows.gemm_with_config(config, device.asarray(x), weight, out)
        # A sum of zeros has no sign.
        found = device.to_host(out).T + dtype.type(0)
        assert_same_bits(found, expected[:, first : first + 64] + dtype.type(0), form)


@pytest.fixture
def hopper():
    with dispatch.forced("sm90"):
        yield


@pytest.mark.sim
def test_projections_have_the_bits_of_the_widened_weight(rng, hopper):
    """Through the operators of blocks, with few rows from packed words and with more, or odd shapes, from values."""
    calls = []
    for rows, n, k in ((5, 32, 128), (70, 32, 128), (3, 32, 192)):
        weight, values = quantized(rng, "int4", (n, k), 64, BF16)
        x, residual = (device.asarray(matrix(rng, shape, BF16)) for shape in ((rows, k), (rows, n)))
        pair = tuple(device.asarray(matrix(rng, (size, 8), BF16)) for size in (rows, n))
        outs = [device.xp().full((rows, n), np.nan, x.dtype) for _ in range(2)]
        calls.append(is_packed_gemm(x, weight, outs[0], residual, *pair))
        multiply(x, weight, outs[0], PlainMemory(), residual=residual, low_rank=pair)
        gemm.linear(x, values, outs[1], residual=residual, low_rank=pair)
        assert_same_bits(*outs, f"{rows} rows")
        halves = [[device.xp().full((rows, size), np.nan, x.dtype) for size in (n, n // 2)] for _ in range(2)]
        multiply_swiglu(x, weight, *halves[0], PlainMemory())
        gemm.linear_swiglu(x, values, *halves[1])
        for found, expected in zip(*halves, strict=True):
            assert_same_bits(found, expected, f"SwiGLU, {rows} rows")
    assert calls == [True, False, False]


@pytest.mark.sim
@pytest.mark.parametrize("packed", [False, True])
def test_few_rows_reduce_in_the_kernel_that_adds_the_low_rank(rng, hopper, packed, launched):
    """With more rows, and where a pair of columns is of two adapters, by kernels of its own: the same bits."""
    n, k = 32, 128
    weight, values = quantized(rng, "int4", (n, k), 64, BF16)
    weight, kernel = (weight, "packed_gemm_kernel") if packed else (values, "gemm_sm90_kernel")
    apart = ["gemm_sm90_kernel", "scale_adapters_kernel"]
    for rows, adapters, names in ((5, 1, [kernel]), (64, 3, [kernel]), (70, 1, None), (5, 8, [*apart, kernel])):
        columns = 1 if adapters == 8 else 16
        x, residual = (device.asarray(matrix(rng, shape, BF16)) for shape in ((rows, k), (rows, n)))
        reduction, b = (
            random_adapters(rng, adapters, columns, k, rows, BF16),
            matrix(rng, (n, adapters * columns), BF16),
        )
        b, xa = device.asarray(b), reduced(x, reduction)
        found = device.xp().full(xa.shape, np.nan, x.dtype)
        outs = [device.xp().full((rows, n), np.nan, x.dtype) for _ in range(2)]
        launched.clear()
        multiply(x, weight, outs[0], PlainMemory(), None, residual, (found, b), reduction)
        assert names in (None, launched)
        gemm.linear(x, values, outs[1], None, residual, (xa, b))
        assert_same_bits(found, xa, f"x A^T, {rows} rows")
        assert_same_bits(*outs, f"{rows} rows")
        halves = [[device.xp().full((rows, size), np.nan, x.dtype) for size in (n, n // 2)] for _ in range(2)]
        found.fill(0)
        launched.clear()
        multiply_swiglu(x, weight, *halves[0], PlainMemory(), (found, b), reduction=reduction)
        assert names in (None, launched)
        gemm.linear_swiglu(x, values, *halves[1], (xa, b))
        assert_same_bits(found, xa, f"x A^T, {rows} rows")
        for each, expected in zip(*halves, strict=True):
            assert_same_bits(each, expected, f"SwiGLU, {rows} rows")


@pytest.fixture
def launched():
    """The names of the kernels that are launched, a list."""
    names = []

    def observe(kernel, _):
        names.append(kernel.py_func.__name__)

    launch.observers.append(observe)
    yield names
    launch.observers.remove(observe)


class PlainMemory:
    """A memory of scopes that are not reused."""

    def scope(self):
        return contextlib.nullcontext()

    def empty(self, shape, dtype):
        return device.xp().empty(shape, dtype)


def test_wrong_arguments_are_named(rng):
    if device.name() != "cpu":
        pytest.skip("needs no kernel")
    weight, x = QuantizedWeight.empty(FORMATS["int4"], (16, 128), 64, "float32"), np.zeros((2, 128), np.float32)
    with pytest.raises(ValueError, match=r"packed_linear: out must be \(2, 16\)"):
        packed_linear(x, weight, np.zeros((2, 8), np.float32))
    with pytest.raises(ValueError, match=r"packed_linear_swiglu: gate_up must be \(2, 16\)"):
        packed_linear_swiglu(x, weight, np.zeros((2, 8), np.float32), np.zeros((2, 8), np.float32))
    assert not is_packed_gemm(x, weight)
    low_rank, out = (np.zeros((2, 6), np.float32), np.zeros((16, 6), np.float32)), np.zeros((2, 16), np.float32)
    a, scales = np.zeros((6, 128), np.float32), np.ones(4, np.float32)
    for product, values in ((packed_linear, weight), (gemm.linear, np.zeros((16, 128), np.float32))):
        name = product.__name__
        with pytest.raises(ValueError, match=f"{name}: a reduction needs low_rank, whose first matrix it writes"):
            product(x, values, out, reduction=Reduction(a, scales[:1]))
        with pytest.raises(ValueError, match=rf"{name}: reduction.a must be \(6, 128\)"):
            product(x, values, out, low_rank=low_rank, reduction=Reduction(a[:, :8].copy(), scales[:1]))
        with pytest.raises(ValueError, match=f"{name}: reduction.a must have rows for each of 4 adapters, got 6"):
            product(x, values, out, low_rank=low_rank, reduction=Reduction(a, scales))
        with pytest.raises(ValueError, match=rf"{name}: reduction.adapter_ids must be \(2\) int32"):
            product(x, values, out, low_rank=low_rank, reduction=Reduction(a, scales[:2], np.zeros(3, np.int32)))


LAYERS = [(6144, 4096, False), (4096, 4096, False), (24_576, 4096, True), (4096, 12_288, False), (1536, 640, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("has_low_rank", [False, True])
@pytest.mark.parametrize("element", [BF16, F16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("n, k, swiglu", LAYERS)
def test_gpu(rng, form, element, n, k, swiglu, has_low_rank):
    """Layers of Qwen3-8B, and of a small model: every number of rows has the bits of the 16-bit GEMM of 300 rows."""
    x, pair = device.asarray(matrix(rng, (300, k), element)), None
    source = device.asarray((0.02 * rng.standard_normal((n, k), np.float32)).astype(x.dtype))
    weight, values = QuantizedWeight.empty(FORMATS[form], (n, k), 64, element), device.xp().empty_like(source)
    quantize(source, 0, weight)
    dequantize(weight, values)
    residual, bias = device.asarray(matrix(rng, (300, n), element)), device.asarray(matrix(rng, n, element))
    if has_low_rank:
        pair = tuple(device.asarray(matrix(rng, (size, 24), element)) for size in (300, n))
    outs = [device.xp().zeros((300, size), x.dtype) for size in (n, n // 2)]
    if swiglu:
        gemm.linear_swiglu(x, values, *outs, low_rank=pair)
    else:
        gemm.linear(x, values, outs[0], bias, residual, pair)
    for m in (1, 2, 7, 8, 9, 16, 17, 33, 64):
        low_rank = pair and (pair[0][:m], pair[1])
        found = [device.xp().zeros((m, size), x.dtype) for size in (n, n // 2)]
        assert is_packed_gemm(x[:m], weight, *found, *(low_rank or ()), bias=bias, swiglu=swiglu)
        if swiglu:
            packed_linear_swiglu(x[:m], weight, *found, low_rank)
        else:
            packed_linear(x[:m], weight, found[0], bias, residual[:m], low_rank)
        for few, many in zip(found, outs, strict=True):
            assert_same_bits(few, many[:m], f"{form}, {m} rows by {n} x {k}")


def outputs_of(weight, x):
    """Zeros for (out, or gate_up and activated) of a projection."""
    return [device.xp().zeros((len(x), size), x.dtype) for size in (len(weight), len(weight) // 2)]


def project(weight, swiglu, x, residual, low_rank, reduction, outs):
    """A projection with a low rank, whose first matrix may be written, to arrays of outputs_of."""
    if swiglu:
        multiply_swiglu(x, weight, *outs, PlainMemory(), low_rank, reduction=reduction)
    else:
        multiply(x, weight, outs[0], PlainMemory(), None, residual, low_rank, reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("n, k, swiglu", LAYERS[:4])
def test_gpu_transposed(rng, form, n, k, swiglu):
    """C^T = W A^T, widened by warps of their own and by those that multiply: the bits of C with A in registers."""
    weight, _ = quantized(rng, form, (n, k), 64, BF16)
    b, columns = device.asarray(matrix(rng, (n, 48), BF16)), n // 2 if swiglu else n
    for m in (1, 8, 11, 40):
        x, residual = (device.asarray(matrix(rng, shape, BF16)) for shape in ((m, k), (m, columns)))
        reduction, epilogue = random_adapters(rng, 1, 48, k, m, BF16), (BF16, False, not swiglu, swiglu, True)
        chosen = packed_config(m, columns, k, form, 64, device.sm_count(), epilogue)
        turns = config_of_width(32, chosen.rows, (columns, k), form, 64, epilogue)
        assert chosen.swapped and turns.swapped and turns.teams == 2
        found = []
        for config in (with_stages(turns._replace(swapped=False, teams=1)), turns, chosen):
            xa, out = device.xp().zeros((m, 48), x.dtype), device.xp().zeros((m, n), x.dtype)
            found.append((xa, out, residual.copy()))
            config = config._replace(reduces=True)
            few_rows.gemm_with_config(config, x, weight, out, None, found[-1][2], (xa, b), reduction)
        for arrays in found[1:]:
            for each, wanted in zip(arrays, found[0], strict=True):
                assert_same_bits(each, wanted, f"{form}, {m} rows by {n} x {k}")


# Warpgroups that widen in their registers, rows of the weight of each, panels, steps at once: those not chosen.
WARPGROUPS = [(1, 64, 2, 1), (2, 64, 2, 2), (2, 32, 2, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("n, k, swiglu", [(4096, 4096, False), (1536, 640, True)])
def test_gpu_in_registers(rng, form, n, k, swiglu):
    """Warpgroups that widen in their registers: the bits of the form that is chosen."""
    weight, _ = quantized(rng, form, (n, k), 64, BF16)
    b, columns = device.asarray(matrix(rng, (n, 48), BF16)), n // 2 if swiglu else n
    for m in (8, 24):
        x, residual = (device.asarray(matrix(rng, shape, BF16)) for shape in ((m, k), (m, columns)))
        reduction, epilogue = random_adapters(rng, 1, 48, k, m, BF16), (BF16, False, not swiglu, swiglu, True)
        chosen = packed_config(m, columns, k, form, 64, device.sm_count(), epilogue)
        configs = [chosen]
        for constants in WARPGROUPS:
            configs.append(config_in_registers(constants, chosen.rows, columns, form, 64, epilogue))
        found = []
        for config in configs:
            assert is_possible(config) and has_turns(config, k)
            xa, out = device.xp().zeros((m, 48), x.dtype), device.xp().zeros((m, n), x.dtype)
            found.append((xa, out, residual.copy()))
            few_rows.gemm_with_config(
                config._replace(reduces=True), x, weight, out, None, found[-1][2], (xa, b), reduction
            )
        for config, arrays in zip(configs[1:], found[1:], strict=True):
            for each, wanted in zip(arrays, found[0], strict=True):
                assert_same_bits(each, wanted, f"{m} rows by {n} x {k}, {config}")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "nf4", None])
@pytest.mark.parametrize("n, k, swiglu", LAYERS)
def test_gpu_reduction(rng, form, n, k, swiglu):
    """The kernel that writes x A^T, too, has the bits of three kernels, however often, and in what stream, it runs.

    form None: a weight of 16 bits, of which one kernel takes more rows.
    """
    many = () if form else ((65, 1), (150, 3), (256, 1), (512, 3))
    weight, values = quantized(rng, form or "int4", (n, k), 64, BF16)
    weight, b = weight if form else values, device.asarray(matrix(rng, (n, 48), BF16))
    contexts = [Context(device.xp().cuda.Stream(non_blocking=True)) for _ in range(2)]
    for m, adapters in ((1, 1), (7, 3), (8, 1), (9, 3), (17, 1), (64, 3), *many):
        x, residual = (device.asarray(matrix(rng, shape, BF16)) for shape in ((m, k), (m, n)))
        reduction = random_adapters(rng, adapters, 48 // adapters, k, m, BF16)
        expected_rank = device.xp().zeros((m, 48), x.dtype)
        gemm.reduce_rank(x, reduction, expected_rank)
        expected = outputs_of(weight, x)
        project(weight, swiglu, x, residual, (expected_rank, b), None, expected)
        # Both streams at once, each kernel as early as PDL allows, all of a stream with one array for x A^T.
        low_ranks = [device.xp().zeros((m, 48), x.dtype) for _ in contexts]
        found = [outputs_of(weight, x) for _ in range(2 * 20)]
        # Arrays are filled in another stream; in one of these a kernel with PDL would not wait for it.
        device.synchronize()
        for first in range(0, len(found), 2):
            for each, xa, outs in zip(contexts, low_ranks, found[first : first + 2], strict=True):
                with each.use(), launch.pdl_scope():
                    project(weight, swiglu, x, residual, (xa, b), reduction, outs)
        device.synchronize()
        for xa in low_ranks:
            assert_same_bits(xa, expected_rank, f"x A^T, {form}, {m} rows by {n} x {k}")
        for outs in found:
            for each, wanted in zip(outs, expected, strict=True):
                assert_same_bits(each, wanted, f"{form}, {m} rows by {n} x {k}")
        for each in contexts:
            assert not device.to_host(each.own(reduction_counters)).any()


def types_of(config):
    """Types of packed_gemm_kernel's arguments, without bias and residual."""
    tensor_map, nothing, pairs, number = "uint8[::1]", "int32[::1]", "int32[:,::1]", "int64"
    weight = tuple_type(few_rows.PackedWeight, nothing, "float32[::1]", "float32[::1]", *[number] * 3)
    rank_operands = tuple_type(sm90.LowRank, tensor_map, tensor_map, number) if config.low_rank else number
    if config.reduces:
        arrays = pairs, "float32[::1]", nothing, number, nothing
        rank_operands = tuple_type(ReducingLowRank, tensor_map, tensor_map, number, tensor_map, *arrays)
    return [tensor_map, weight, rank_operands, pairs, pairs, nothing, *[number] * 3]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "m, n, k, swiglu",
    [(1, 6144, 4096, False), (16, 12_288, 4096, True), (32, 5120, 4096, False), (64, 5120, 12_288, False)],
)
def test_chosen_configs_compile_for_gpus(compile_offline, form, m, n, k, swiglu):
    """The tiles for layers of Qwen3-8B, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    fields = "bfloat16", False, not swiglu, swiglu, True
    config = packed_config(m, n, k, form, FORMATS[form].group_size, 132, fields)
    configs = [config, config._replace(reduces=True)]
    for each in configs:
        troubles = compile_offline(few_rows.packed_gemm_kernel(each), types_of(each), (9, 0, "a"))
        assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "constants, rows, swiglu", [((3, 64, 2, 1), 8, True), ((1, 32, 2, 2), 16, False), ((2, 64, 2, 4), 64, True)]
)
def test_warpgroups_that_widen_compile_for_gpus(compile_offline, form, constants, rows, swiglu):
    """Without a spill, and without wgmma that waits for the one before."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    epilogue = "bfloat16", False, not swiglu, swiglu, True
    config = config_in_registers(constants, rows, 12_288, form, FORMATS[form].group_size, epilogue)
    config = config._replace(reduces=True)
    assert is_possible(config) and config.layout.nbytes <= 227 * 1024
    troubles = compile_offline(few_rows.packed_gemm_kernel(config), types_of(config), (9, 0, "a"))
    assert not troubles, "\n".join(troubles)
