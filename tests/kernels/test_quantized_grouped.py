"""The grouped GEMM of few rows by packed weights of experts: the bits of the 16-bit one on the weights' values."""

import itertools

import numpy as np
import pytest

from rlnumba.kernels.gemm import grouped_sm90
from rlnumba.kernels.gemm.grouped import grouped_gemm, grouped_gemm_swiglu
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig
from rlnumba.kernels.quantized import few_rows, grouped
from rlnumba.kernels.quantized.few_rows_config import PackedGemmConfig, grouped_config, is_possible
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.kernels.quantized.grouped import (
    is_packed_grouped_gemm,
    packed_grouped_gemm,
    packed_grouped_gemm_swiglu,
)
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize, quantize
from rlnumba.model.blocks.projection import multiply_experts, multiply_experts_swiglu
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.arguments import tuple_type
from rlnumba.runtime.launch import pdl_scope
from tests.close import assert_same_bits
from tests.kernels.gemm_cases import matrix
from tests.kernels.test_grouped_gemm import starts_of
from tests.kernels.test_grouped_gemm_sm90 import DOWN, EXPERTS, UP, gpu_random, routed
from tests.kernels.test_quantized_gemm import PlainMemory

pytestmark = pytest.mark.sm90

BF16, F16 = "bfloat16", "float16"


def quantized(rng, form, shape, group_size, element):
    """(QuantizedWeight (E, N, K), its values) of random matrices."""
    experts, n, k = shape
    if device.name() == "cuda":
        x = gpu_random(experts * n, k, dtype=element, scale=0.02)
    else:
        x = (0.02 * rng.standard_normal((experts * n, k), np.float32)).astype(device.dtype(element))
    weight = QuantizedWeight.empty(FORMATS[form], shape, group_size, element)
    values = device.xp().empty(shape, weight.dtype)
    quantize(x, 0, weight)
    dequantize(weight, values)
    return weight, values


def of_config(form, columns, warps, panels, rows, group_tiles, whole_tiles, element, **fields):
    """A grouped config with the fewest stages."""
    fields = {"grouped": True} | fields
    return PackedGemmConfig(form, columns, warps, panels, 2, rows, group_tiles, whole_tiles, element, **fields)


# A config; rows of each expert: none, one, a tile's, one more; N and K: several tiles and more stages than the rings
# have; blocks. Three blocks compute the second row tile of an expert before its first one.
SIMULATED = [
    (of_config("int8", 32, 4, 2, 8, 2, True, BF16), (3, 0, 9, 1), 64, 256, 3),
    (of_config("int8", 32, 4, 2, 16, 1, False, BF16, swiglu=True), (0, 0, 17), 48, 128, 1),
    (of_config("int4", 64, 4, 4, 8, 2, True, BF16), (8, 1, 0), 96, 256, 1),
    (of_config("fp8", 64, 8, 2, 32, 1, True, F16, swiglu=True), (0, 33, 0, 1), 32, 128, 1),
    (of_config("nf4", 16, 2, 2, 64, 1, False, BF16), (65, 0), 32, 256, 1),
    (of_config("nf4", 32, 4, 2, 8, 1, False, F16, swiglu=True), (1, 0, 0, 2), 16, 128, 1),
    # More experts than lanes.
    (of_config("int4", 16, 2, 2, 8, 1, False, BF16), (0,) * 31 + (1, 0, 1, 0), 32, 128, 1),
]


@pytest.mark.sim
@pytest.mark.parametrize("config, counts, n, k, blocks", SIMULATED)
def test_simulator(rng, monkeypatch, config, counts, n, k, blocks):
    """The bits of the kernel of gemm/grouped_sm90.py, and no row of C that is of no expert is written."""
    assert is_possible(config)
    monkeypatch.setattr(device, "sm_count", lambda: blocks)
    halves, xp, rows = 2 if config.swiglu else 1, device.xp(), sum(counts)
    weights, values = quantized(rng, config.form, (len(counts), halves * n, k), 64 * config.group_tiles, config.element)
    x, starts = device.asarray(matrix(rng, (rows + 3, k), config.element)), device.asarray(starts_of(counts))
    plain = Sm90GemmConfig(64, 1, 2, config.element, swiglu=config.swiglu)
    # Rows that do not exist for the kernel, behind those of the last expert.
    outs = [[xp.full((rows + 3, size), np.nan, x.dtype) for size in (halves * n, n)] for _ in range(2)]
    grouped.gemm_rows_with_config(config, x, weights, starts, *outs[0])
    grouped_sm90.gemm_rows_with_config(plain, x, values, starts, *outs[1])
    for found, expected, name in zip(*outs, ("C", "activated"), strict=True):
        assert_same_bits(found, expected, f"{name}, {config}")
        written = ~np.isnan(device.to_host(found).astype(np.float32))
        assert written[:rows].all() == (config.swiglu or name == "C") and not written[rows:].any()


@pytest.mark.sim
def test_chain_with_early_starts(rng):
    """Kernels of a chain that begin as early as PDL allows read what those before them have written."""
    if device.name() != "sim":
        pytest.skip("the simulator runs each kernel as early as PDL allows")
    x, starts = matrix(rng, (1, 128), BF16), starts_of((0, 1))
    up, _ = quantized(rng, "int8", (2, 256, 128), 128, BF16)
    down, _ = quantized(rng, "int4", (2, 32, 128), 128, BF16)

    def chain():
        gate_up, activated, out = (np.zeros((1, size), x.dtype) for size in (256, 128, 32))
        packed_grouped_gemm_swiglu(x, up, starts, gate_up, activated)
        packed_grouped_gemm(activated, down, starts, out)
        return out

    with dispatch.forced("sm90"):
        expected = chain()
        with pdl_scope():
            overlapped = chain()
    assert_same_bits(overlapped, expected)


def test_every_chosen_config_is_possible():
    """Whatever the rows, an SM holds the rings and the table; kernels are few."""
    for form, swiglu in itertools.product(FORMATS.values(), (False, True)):
        for shape in ((1536, 2048), (2048, 768), (2048, 512), (768, 2048), (64, 128)):
            chosen = set()
            for experts in (8, 128, 512):
                for rows in (1, 8, 64, 512, 2048, 8192):
                    config = grouped_config(rows, experts, shape, form.name, form.group_size, 132, BF16, swiglu)
                    chosen.add(config)
                    assert config.grouped and is_possible(config) and config.stages >= 3
                    assert shape[1] % (64 * config.panels) == 0 and config.threads <= 1024
                    assert config.layout.nbytes + 4 * (experts + 1) <= 227 * 1024
            assert len(chosen) <= 24


@pytest.mark.sim
def test_what_the_operators_take():
    """Up to 64 rows an expert on average, experts of whole tiles, groups of whole tiles; wrong arrays are named."""
    xp, dtype, starts = device.xp(), device.dtype(BF16), device.asarray(starts_of((4, 0)))
    weights = QuantizedWeight.empty(FORMATS["int8"], (2, 32, 128), 128, BF16)
    x, out = xp.zeros((4, 128), dtype), xp.zeros((4, 32), dtype)
    with dispatch.forced("sm90"):
        assert is_packed_grouped_gemm(x, weights, out) and is_packed_grouped_gemm(xp.zeros((128, 128), dtype), weights)
        for other in (xp.zeros((129, 128), dtype), x[:0], xp.zeros((4, 128), np.float32)):
            assert not is_packed_grouped_gemm(other, weights), other.shape
        for shape, group_size in (((2, 24, 128), 128), ((2, 32, 192), 64), ((2, 32, 384), 192), ((32, 128), 128)):
            odd = QuantizedWeight.empty(FORMATS["int8"], shape, group_size, BF16)
            assert not is_packed_grouped_gemm(xp.zeros((4, shape[-1]), dtype), odd), shape
    with dispatch.forced("sm80" if device.name() == "cuda" else "simt"):
        assert not is_packed_grouped_gemm(x, weights, out)
    with pytest.raises(ValueError, match=r"packed_grouped_gemm: out must be \(4, 32\)"):
        packed_grouped_gemm(x, weights, starts, out[:3])
    with pytest.raises(ValueError, match=r"packed_grouped_gemm: starts must be \(3\) int32"):
        packed_grouped_gemm(x, weights, starts[1:], out)
    with pytest.raises(ValueError, match=r"packed_grouped_gemm_swiglu: gate_up must be \(4, 32\)"):
        packed_grouped_gemm_swiglu(x, weights, starts, xp.zeros((4, 16), dtype), out)


@pytest.mark.sim
def test_experts_have_the_bits_of_the_widened_weights(rng):
    """Through the operators of blocks, with few rows from packed words and with more, or odd shapes, from values."""
    calls = []
    with dispatch.forced("sm90"):
        for counts, n, k in (((2, 0, 1), 64, 128), ((1, 0), 24, 128)):
            weights, values = quantized(rng, "int8", (len(counts), n, k), 128, BF16)
            x, starts = device.asarray(matrix(rng, (sum(counts), k), BF16)), device.asarray(starts_of(counts))
            outs = [[device.xp().zeros((len(x), size), x.dtype) for size in (n, n, n // 2)] for _ in range(2)]
            calls.append(is_packed_grouped_gemm(x, weights, *outs[0]))
            # Packed words need no memory for values.
            memory = None if calls[-1] else PlainMemory()
            multiply_experts(x, weights, starts, outs[0][0], memory)
            multiply_experts_swiglu(x, weights, starts, *outs[0][1:], memory)
            grouped_gemm(x, values, starts, outs[1][0])
            grouped_gemm_swiglu(x, values, starts, *outs[1][1:])
            for found, expected in zip(*outs, strict=True):
                assert_same_bits(found, expected, f"{counts} rows by {n} x {k}")
    assert calls == [True, False]


def types_of(config):
    """Types of packed_grouped_gemm_kernel's arguments."""
    floats, words, pairs, number = "float32[::1]", "int32[::1]", "int32[:,::1]", "int64"
    weight = tuple_type(few_rows.PackedWeight, words, floats, floats, *[number] * 3)
    return ["uint8[::1]", weight, words, pairs, pairs, number, number]


@pytest.mark.parametrize(
    "form, rows, swiglu",
    [*itertools.product(FORMATS, (8,), (True,)), *itertools.product(FORMATS, (512,), (False,)), ("int8", 8192, True)],
)
def test_chosen_configs_compile_for_gpus(compile_offline, form, rows, swiglu):
    """Those of 1, 64 and 1,024 tokens, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    shape = (UP[0] // 2, UP[1]) if swiglu else DOWN
    config = grouped_config(rows, EXPERTS, shape, form, FORMATS[form].group_size, 132, BF16, swiglu)
    troubles = compile_offline(grouped.packed_grouped_gemm_kernel(config), types_of(config), (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


def on_gpu(weights, values, counts, swiglu):
    """Both operators on rows of each expert: ([found], [expected])."""
    rows, n, k = int(sum(counts)), *weights.shape[1:]
    x, starts = gpu_random(rows, k), device.asarray(starts_of(counts))
    sizes = (n, n // 2) if swiglu else (n,)
    found, expected = ([device.xp().full((rows, size), np.nan, x.dtype) for size in sizes] for _ in range(2))
    assert is_packed_grouped_gemm(x, weights, *found)
    (packed_grouped_gemm_swiglu if swiglu else packed_grouped_gemm)(x, weights, starts, *found)
    (grouped_gemm_swiglu if swiglu else grouped_gemm)(x, values, starts, *expected)
    return found, expected


@pytest.mark.gpu
@pytest.mark.parametrize("form, tokens", [("int8", (1, 8, 64, 256)), ("int4", (8,)), ("fp8", (8,)), ("nf4", (8,))])
def test_gpu(rng, form, tokens):
    """Random routes, and one expert with nearly all rows, have the bits of the 16-bit kernels. Sizes are those of the
    tests of these and of the bench, whose kernels the disk cache has."""
    for shape, swiglu in ((UP, True), (DOWN, False)):
        weights, values = quantized(rng, form, (32, *shape), FORMATS[form].group_size, BF16)
        for counts in (*(routed(rng, count, 32) for count in tokens), [0] * 7 + [61, 0, 3] + [0] * 22):
            for found, expected in zip(*on_gpu(weights, values, counts, swiglu), strict=True):
                assert_same_bits(found, expected, f"{form}, {sum(counts)} rows by {shape}")


@pytest.mark.gpu
def test_gpu_graph(rng):
    """A captured graph follows the starts that it finds when it is replayed."""
    import cupy

    weights, values = quantized(rng, "int8", (32, *DOWN), 128, BF16)
    x, starts = gpu_random(64, DOWN[1]), cupy.zeros(33, np.int32)
    out, expected = cupy.zeros((64, DOWN[0]), x.dtype), cupy.zeros((64, DOWN[0]), x.dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        packed_grouped_gemm(x, weights, starts, out)
        stream.begin_capture()
        packed_grouped_gemm(x, weights, starts, out)
        graph = stream.end_capture()
        for _ in range(3):
            starts.set(starts_of(routed(rng, 8, 32)))
            graph.launch()
            grouped_gemm(x, values, starts, expected)
            stream.synchronize()
            assert_same_bits(out, expected)
            assert np.asarray(device.to_host(out)).astype(np.float32).any(axis=1).all()
