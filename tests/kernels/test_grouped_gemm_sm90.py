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
from rlnumba.kernels.gemm.grouped_config import best_sm90_config, best_sm90_dw_config
from rlnumba.kernels.gemm.grouped_sm90 import (
    gemm_rows_with_config,
    gemm_weights_with_config,
    grouped_gemm_dw_sm90_kernel,
    grouped_gemm_sm90_kernel,
)
from rlnumba.kernels.gemm.ops import linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig
from rlnumba.kernels.nn.swiglu import swiglu
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.launch import pdl_scope
from tests.close import assert_close, assert_same_bits
from tests.kernels.gemm_cases import matrix
from tests.kernels.test_grouped_gemm import starts_of

SIMULATED = [
    # A consumer without rows, one with all 64, one with some; ragged edges of N and K.
    (Sm90GemmConfig(64, 2, 2, "bfloat16"), (0, 130, 3), 72, 72),
    # Several panels a stage, threads that store, rows in eights.
    (Sm90GemmConfig(32, 1, 3, "float16", panels=2, streams_b=True), (9, 0, 40), 40, 256),
    # B lies MN-major, and its steps end within a stage.
    (Sm90GemmConfig(64, 1, 2, "bfloat16", b_mn=True), (2, 65), 72, 40),
    # More experts than lanes.
    (Sm90GemmConfig(32, 1, 2, "bfloat16"), (0,) * 30 + (1, 0, 0, 2, 0), 8, 64),
]


@pytest.mark.parametrize("config, counts, n, k", SIMULATED)
@pytest.mark.sim
@pytest.mark.sm90
def test_rows_in_the_simulator(rng, config, counts, n, k):
    rows, experts, starts = sum(counts), len(counts), starts_of(counts)
    x, weights = matrix(rng, (rows, k), config.element), matrix(rng, (experts, n, k), config.element)
    out = device.xp().full((rows, n), np.nan, x.dtype)
    stored = np.ascontiguousarray(weights.transpose(0, 2, 1)) if config.b_mn else weights
    gemm_rows_with_config(config, *map(device.asarray, (x, stored, starts)), out)
    expected = grouped_gemm_ref(x.astype(np.float64), weights.astype(np.float64), starts)
    assert_close(out, expected, terms=k, what=str(config))


SWIGLU_SIMULATED = [
    # Threads store both; the gate's last tile reaches into what it gates.
    (Sm90GemmConfig(32, 1, 2, "bfloat16", swiglu=True, panels=2, streams_b=True), (9, 0, 40), 24, 128),
    # By TMA where all of a consumer's rows are the expert's; tiles along the columns first.
    (Sm90GemmConfig(128, 2, 4, "bfloat16", swiglu=True), (130, 3), 72, 72),
]


@pytest.mark.parametrize("config, counts, n, k", SWIGLU_SIMULATED)
@pytest.mark.sim
@pytest.mark.sm90
def test_swiglu_in_the_simulator(rng, config, counts, n, k):
    """The bits of a product, and of swiglu of it."""
    rows, experts, xp = sum(counts), len(counts), device.xp()
    arrays = matrix(rng, (rows, k), config.element), matrix(rng, (experts, 2 * n, k), config.element), starts_of(counts)
    x, weights, starts = map(device.asarray, arrays)
    gate_up, out = xp.full((rows, 2 * n), np.nan, x.dtype), xp.full((rows, n), np.nan, x.dtype)
    gemm_rows_with_config(config, x, weights, starts, gate_up, out)
    expected, activated = xp.full((rows, 2 * n), np.nan, x.dtype), xp.full((rows, n), np.nan, x.dtype)
    gemm_rows_with_config(SIMULATED[0][0]._replace(element=config.element), x, weights, starts, expected)
    swiglu(expected, activated)
    assert_same_bits(gate_up, expected, "gate_up")
    assert_same_bits(out, activated, "out")


DW_SIMULATED = [
    # No rows, less than a stage, exactly one, one and a part; both consumers, two tiles each way.
    (Sm90GemmConfig(64, 2, 2, "bfloat16", True, True, "add"), (0, 5, 64, 70), 136, 72),
    (Sm90GemmConfig(128, 1, 2, "float16", True, True), (66, 0), 40, 136),
    (Sm90GemmConfig(64, 1, 3, "bfloat16", True, True, "float32"), (1, 130), 72, 64),
]


@pytest.mark.parametrize("config, counts, n, k", DW_SIMULATED)
@pytest.mark.sim
@pytest.mark.sm90
def test_weights_in_the_simulator(rng, config, counts, n, k):
    rows, experts, starts = sum(counts), len(counts), starts_of(counts)
    dy, x = matrix(rng, (rows, n), config.element), matrix(rng, (rows, k), config.element)
    out = device.xp().ones((experts, n, k), x.dtype if config.output == "same" else np.float32)
    gemm_weights_with_config(config, *map(device.asarray, (dy, x, starts)), out)
    zeros = np.zeros((experts, n, k))
    _, expected = grouped_gemm_backward_ref(dy.astype(np.float64), x.astype(np.float64), zeros, starts)
    assert_close(out, expected + (config.output == "add"), terms=max(counts), what=str(config))


@pytest.mark.sim
def test_chain_with_early_starts(rng):
    """Kernels of a chain that begin as early as PDL allows read what those before them have written."""
    if device.name() != "sim":
        pytest.skip("the simulator runs each kernel as early as PDL allows")
    x, up, down = (matrix(rng, shape, "bfloat16") for shape in ((5, 64), (2, 72, 64), (2, 64, 72)))
    starts = starts_of((4, 1))

    def chain():
        wide, narrow = np.zeros((5, 72), x.dtype), np.zeros((5, 64), x.dtype)
        grouped_gemm(x, up, starts, wide)
        grouped_gemm(wide, down, starts, narrow)
        return narrow

    with dispatch.forced("sm90"):
        expected = chain()
        with pdl_scope():
            overlapped = chain()
    assert_same_bits(overlapped, expected)


# Qwen3-30B-A3B: experts, gate-up's (N, K) and down's.
EXPERTS, UP, DOWN = 128, (1536, 2048), (2048, 768)


def test_every_chosen_config_is_possible():
    """Whatever the rows, the config and its table of row tiles fit an SM; kernels are few."""
    chosen = set()
    for experts in (8, 128, 512):
        for columns, steps in (UP, DOWN, (64, 64), (72, 8)):
            for rows in (1, 8, 64, 512, 2048, 16_384, 131_072):
                for b_mn in (False, True):
                    config = best_sm90_config(rows, experts, columns, steps, "bfloat16", b_mn, 132)
                    assert config.layout.nbytes + 4 * (experts + 1) <= 227 * 1024 and config.stages >= 3
                    assert not b_mn or config.columns % 64 == 0
                    if experts == EXPERTS and (columns, steps) == UP:
                        chosen.add(config)
    assert len(chosen) <= 6


KERNELS = [
    (grouped_gemm_sm90_kernel, best_sm90_config(8, EXPERTS, *UP, "bfloat16", False, 132)),
    (grouped_gemm_sm90_kernel, best_sm90_config(131_072, EXPERTS, *UP, "bfloat16", False, 132)),
    (grouped_gemm_sm90_kernel, best_sm90_config(131_072, EXPERTS, *UP[::-1], "bfloat16", True, 132)),
    (grouped_gemm_sm90_kernel, best_sm90_config(8, EXPERTS, *UP, "bfloat16", False, 132, True)),
    (grouped_gemm_sm90_kernel, best_sm90_config(131_072, EXPERTS, *UP, "bfloat16", False, 132, True)),
    (grouped_gemm_dw_sm90_kernel, best_sm90_dw_config(*UP, "bfloat16", "add")),
]


@pytest.mark.parametrize("kernel, config", KERNELS)
def test_kernels_compile_for_gpus(compile_offline, kernel, config):
    """The tiles for decode and for training, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    tensor_map, starts, size = "uint8[::1]", "int32[::1]", "int64"
    rows = [*[tensor_map] * 3, starts, *[tensor_map, "int32[:,::1]"] * 2, size, size]
    types = rows if kernel is grouped_gemm_sm90_kernel else [tensor_map, tensor_map, starts, tensor_map, size, size]
    troubles = compile_offline(kernel(config), types, (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


def routed(rng, tokens, experts=EXPERTS, top_k=8):
    """Rows of each expert, where every token has so many experts drawn at random."""
    drawn = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    return np.bincount(drawn.reshape(-1), minlength=experts)


def gpu_random(*shape, dtype="bfloat16", scale=1.0):
    import cupy

    return (cupy.random.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(device.dtype(dtype))


def check_gpu(counts, n, k):
    """Forward, dx and dw of each expert have the bits of the dense GEMMs of its rows and weight."""
    import cupy

    bounds, experts, rows = starts_of(counts), len(counts), int(sum(counts))
    x, dy, weights = gpu_random(rows, k), gpu_random(rows, n), gpu_random(experts, n, k, scale=0.05)
    starts = cupy.asarray(bounds)
    out, dx = cupy.full((rows, n), np.nan, x.dtype), cupy.full((rows, k), np.nan, x.dtype)
    dw, narrow = cupy.ones((experts, n, k), np.float32), cupy.full((experts, n, k), np.nan, x.dtype)
    grouped_gemm(x, weights, starts, out)
    grouped_gemm_dx(dy, weights, starts, dx)
    grouped_gemm_dw(dy, x, starts, dw)
    grouped_gemm_dw(dy, x, starts, narrow, accumulate=False)
    expected, expected_dx = cupy.zeros_like(out), cupy.zeros_like(dx)
    expected_dw, expected_narrow = cupy.ones_like(dw), cupy.zeros_like(narrow)
    for e in np.flatnonzero(counts):
        own = slice(*bounds[e : e + 2])
        linear(x[own], weights[e], expected[own])
        linear_backward_input(dy[own], weights[e], expected_dx[own])
        linear_backward_weight(dy[own], x[own], expected_dw[e])
        linear_backward_weight(dy[own], x[own], expected_narrow[e], accumulate=False)
    gate_up, activated = cupy.full_like(out, np.nan), cupy.full((rows, n // 2), np.nan, x.dtype)
    grouped_gemm_swiglu(x, weights, starts, gate_up, activated)
    expected_activated = cupy.empty_like(activated)
    swiglu(expected, expected_activated)
    names = f"{rows} rows, {n} x {k}"
    assert_same_bits(gate_up, expected, f"gate_up, {names}")
    assert_same_bits(activated, expected_activated, f"SwiGLU, {names}")
    assert_same_bits(out, expected, f"out, {names}")
    assert_same_bits(dx, expected_dx, f"dx, {names}")
    assert_same_bits(dw, expected_dw, f"dw, {names}")
    assert_same_bits(narrow, expected_narrow, f"dw rounded, {names}")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 1500])
def test_gpu(rng, family, tokens):
    """Random routes, and one expert that has all rows."""
    if family == "sm90" and dispatch.architecture() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    with dispatch.forced(f"gemm={family}"):
        check_gpu(routed(rng, tokens, 32), *UP)
        check_gpu(routed(rng, tokens, 32), *DOWN)
        check_gpu(np.array([0, 8 * tokens, 0, 3]), 200, 328)


@pytest.mark.gpu
def test_gpu_graph(rng):
    """A captured graph follows the starts that it finds when it is replayed."""
    import cupy

    x, weights = gpu_random(64, 256), gpu_random(16, 192, 256)
    starts, out = cupy.zeros(17, np.int32), cupy.zeros((64, 192), x.dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        grouped_gemm(x, weights, starts, out)
        stream.begin_capture()
        grouped_gemm(x, weights, starts, out)
        graph = stream.end_capture()
        for _ in range(3):
            starts.set(starts_of(routed(rng, 8, 16)))
            out.fill(0)
            graph.launch()
            replayed = out.copy()
            out.fill(0)
            grouped_gemm(x, weights, starts, out)
            stream.synchronize()
            assert_same_bits(replayed, out)
            assert np.asarray(device.to_host(out)).astype(np.float32).any(axis=1).all()
