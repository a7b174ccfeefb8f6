import numpy as np
import pytest

from rlnumba.kernels.gemm.scheduler import GemmProblem
from rlnumba.kernels.gemm.sm80 import gemm, gemm_sm80_kernel, gemm_with_config
from rlnumba.kernels.gemm.sm80_config import SHAPES, Sm80GemmConfig, best_config, configs_for
from rlnumba.runtime import device, dispatch
from tests.close import assert_same_bits
from tests.kernels.gemm_cases import SHAPES_OF_MODELS, check_config, check_operators, check_rows, matrix

SIMULATED = [
    # More rounds than stages, ragged edges in every direction, two tiles each way.
    (Sm80GemmConfig(32, 32, 2, 1, 32, 3, "bfloat16"), 40, 40, 136),
    (Sm80GemmConfig(32, 64, 1, 2, 64, 2, "float16", b_mn=True, residual=True, prefetch=True), 20, 72, 72),
    (Sm80GemmConfig(64, 64, 1, 2, 32, 2, "bfloat16", a_mn=True, b_mn=True, output="add"), 72, 64, 40),
    (Sm80GemmConfig(64, 64, 1, 2, 32, 2, "bfloat16", a_mn=True, b_mn=True), 72, 64, 40),
    (Sm80GemmConfig(16, 32, 1, 1, 64, 4, "bfloat16", output="float32"), 17, 40, 64),
    # N ends in the middle of eight columns, bias and C with it; then of the second part of a warp's columns.
    (Sm80GemmConfig(16, 32, 1, 1, 64, 4, "bfloat16", output="float32", bias=True), 5, 12, 16),
    (Sm80GemmConfig(32, 128, 1, 2, 32, 3, "float16", output="float32", bias=True), 17, 100, 24),
    # A warp's part of C goes in two lines, and the residual has no place of its own.
    (Sm80GemmConfig(16, 128, 1, 1, 32, 3, "float16", bias=True, residual=True), 9, 128, 40),
    # One row, and fewer rounds than stages.
    (Sm80GemmConfig(16, 32, 1, 2, 128, 4, "bfloat16", bias=True), 1, 24, 8),
]


@pytest.mark.parametrize("config, m, n, k", SIMULATED)
@pytest.mark.sim
def test_simulator(rng, config, m, n, k):
    check_config(rng, gemm_with_config, config, m, n, k)


@pytest.mark.sim
def test_a_config_does_not_change_bits(rng):
    """A row is the same alone and among others, whichever config it stands in and whichever way B lies."""
    if device.name() == "cuda":
        pytest.skip("test_gpu_rows has this")
    a, b = matrix(rng, (9, 72), "bfloat16"), matrix(rng, (32, 72), "bfloat16")
    one, two, three = (np.zeros((rows, 32), np.float32) for rows in (9, 9, 1))
    gemm_with_config(Sm80GemmConfig(32, 32, 1, 1, 32, 3, "bfloat16", output="float32"), a, b, one)
    across = Sm80GemmConfig(16, 64, 1, 1, 64, 2, "bfloat16", b_mn=True, output="float32")
    gemm_with_config(across, a, b.T.copy(), two)
    gemm_with_config(Sm80GemmConfig(16, 16, 1, 1, 32, 3, "bfloat16", output="float32"), a[4:5].copy(), b, three)
    assert_same_bits(two, one)
    assert_same_bits(three[0], one[4])


KINDS = [
    # a_mn, b_mn, output, bias, residual
    (False, False, "same", True, True),
    (False, False, "float32", False, False),
    (False, True, "same", False, True),
    (True, True, "add", False, False),
]
# Compute capabilities, and the shared memory of a block there.
GPUS = [((8, 0), 163 * 1024), ((8, 6), 99 * 1024), ((9, 0), 227 * 1024), ((12, 0), 99 * 1024)]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("limit", sorted({limit for _, limit in GPUS}))
def test_every_chosen_config_is_possible(kinds, limit):
    """Whatever the shape, the config fits an SM, and a GPU of any size has small and large ones."""
    offered = [config for config, _ in configs_for("bfloat16", *kinds, limit)]
    assert {config[:5] for config in offered} <= {shape[:5] for shape in SHAPES}
    assert all(config.shared_bytes <= limit and config.stages >= 2 for config in offered)
    assert max(config.rows * config.columns for config in offered) == 128 * 128
    for m in (1, 8, 64, 65, 256, 5000, 16384):
        for n, k in ((1024, 2048), (4096, 1024), (151_936, 1024), (8, 8), (24_576, 4096)):
            config = best_config(GemmProblem(m, n, k, "bfloat16", *kinds), 108, limit)
            assert config in offered and (m < 16_384 or n < 4096 or config.rows * config.columns >= 128 * 128)


@pytest.mark.parametrize("architecture, limit", GPUS, ids=str)
@pytest.mark.parametrize("kinds", [KINDS[0], KINDS[3]], ids=str)
def test_kernels_compile_for_gpus(compile_offline, architecture, limit, kinds):
    """The largest config of each GPU, whose registers are the scarcest, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config = best_config(GemmProblem(16_384, 4096, 4096, "bfloat16", *kinds), 108, limit)
    x, c, r = "uint16[:,::1]", "float32[:,::1]", "int32[:,::1]"
    types = [x, x, x if config.output == "same" else c, "int32[::1]", x if config.residual else r, *["int64"] * 3]
    troubles = compile_offline(gemm_sm80_kernel(config), types, architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m, n, k", SHAPES_OF_MODELS)
def test_gpu(rng, dtype, m, n, k):
    with dispatch.forced("sm80"):
        check_operators(rng, dtype, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)])
def test_gpu_rows(rng, n, k):
    """The first rows of a product keep their bits, whatever M is."""
    x, w = device.asarray(matrix(rng, (16_384, k), "bfloat16")), device.asarray(matrix(rng, (n, k), "bfloat16"))
    whole = device.xp().zeros((16_384, n), x.dtype)
    gemm(x, w, whole)
    rows = 1, 2, 8, 15, 16, 17, 63, 64, 65, 128, 200, 256, 1000, 4096
    check_rows(whole, lambda m, out: gemm(x[:m], w, out), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_gpu_tiles(rng, kinds):
    """Every config that best_config may choose on any GPU agrees with every other, bit for bit."""
    import cupy

    a_mn, b_mn, output, bias, residual = kinds
    m, n, k = 304, 648, 520
    a = device.asarray(matrix(rng, (k, m) if a_mn else (m, k), "bfloat16"))
    b = device.asarray(matrix(rng, (k, n) if b_mn else (n, k), "bfloat16"))
    addends = [device.asarray(matrix(rng, s, "bfloat16")) for s in (n, (m, n))]
    first = None
    for limit in sorted({min(limit, device.max_shared_bytes()) for _, limit in GPUS}):
        for config, _ in configs_for("bfloat16", *kinds, limit):
            out = cupy.ones((m, n), a.dtype if output == "same" else np.float32)
            gemm_with_config(config, a, b, out, addends[0] if bias else None, addends[1] if residual else None)
            first = out if first is None else first
            assert_same_bits(out, first, str(config))
