import numpy as np
import pytest

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.reduction import ReducingLowRank, Reduction, reduction_counters
from rlnumba.kernels.gemm.scheduler import GemmProblem
from rlnumba.kernels.gemm.sm90 import LowRank, gemm_sm90_kernel, gemm_with_config, reducing_config
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig, best_config, with_own_rank
from rlnumba.kernels.nn.swiglu import ACTIVATIONS, GELU_TANH, swiglu, swiglu_ref
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.arguments import tuple_type
from rlnumba.runtime.context import current
from rlnumba.runtime.launch import pdl_scope
from tests.close import assert_close, assert_same_bits
from tests.graph_edges import edges_of
from tests.kernels.gemm_cases import (
    SHAPES_OF_MODELS,
    check_config,
    check_operators,
    matrix,
    random_adapters,
    reduced,
)


@pytest.fixture
def native():
    """The operators of gemm/ops.py use the sm_90 kernels, or on another GPU those of gemm/sm80.py."""
    with dispatch.forced("sm90" if dispatch.architecture() == (9, 0) else "sm80"):
        yield


SIMULATED = [
    # More rounds than stages, and ragged edges in every direction.
    (Sm90GemmConfig(64, 1, 2, "bfloat16"), 40, 72, 136),
    (Sm90GemmConfig(64, 1, 2, "float16", b_mn=True, residual=True), 40, 72, 72),
    (Sm90GemmConfig(64, 1, 2, "bfloat16", a_mn=True, b_mn=True, output="add"), 40, 72, 72),
    (Sm90GemmConfig(64, 2, 2, "bfloat16", a_mn=True, b_mn=True), 136, 72, 72),
    # Two tiles for one block, and two consumers.
    (Sm90GemmConfig(64, 2, 2, "bfloat16", output="float32"), 129, 64, 64),
    # The residual is loaded by TMA, for two tiles of one block, in two parts.
    (Sm90GemmConfig(256, 1, 2, "bfloat16", bias=True, residual=True), 70, 256, 64),
    # A quarter, half or all of C is loaded by TMA, for two tiles of one block.
    (Sm90GemmConfig(256, 1, 2, "bfloat16", a_mn=True, b_mn=True, output="add", prefetched_columns=64), 72, 256, 72),
    (Sm90GemmConfig(256, 1, 2, "bfloat16", a_mn=True, b_mn=True, output="add", prefetched_columns=128), 72, 256, 72),
    (Sm90GemmConfig(64, 2, 2, "bfloat16", a_mn=True, b_mn=True, output="add", prefetched_columns=64), 136, 72, 72),
    # Threads write C themselves.
    (Sm90GemmConfig(16, 1, 3, "float16", bias=True, residual=True), 5, 40, 200),
    # Several panels a stage, more stages than the ring has, and two tiles for one block.
    (Sm90GemmConfig(16, 1, 2, "bfloat16", panels=2), 70, 40, 384),
    (Sm90GemmConfig(64, 1, 2, "float16", panels=4, output="float32"), 5, 72, 768),
    # Eight lines of A stand for all.
    (Sm90GemmConfig(8, 1, 3, "bfloat16", panels=8, bias=True, residual=True, eight_rows=True), 3, 24, 1024),
    (Sm90GemmConfig(32, 1, 2, "float16", eight_rows=True), 8, 40, 72),
    # With at most eight rows, threads store C and load the residual themselves, without TMA.
    (Sm90GemmConfig(64, 1, 2, "bfloat16", panels=2, residual=True, eight_rows=True), 7, 72, 256),
    (Sm90GemmConfig(16, 1, 2, "bfloat16", residual=True), 40, 24, 136),
    # A weight that is the first to leave L2, in boxes of one panel and of several.
    (Sm90GemmConfig(16, 1, 4, "bfloat16", panels=2, residual=True, eight_rows=True, streams_b=True), 1, 24, 512),
    (Sm90GemmConfig(64, 1, 2, "bfloat16", streams_b=True), 70, 72, 136),
    # A second product of 24 steps: after a ragged last stage, of panels, of eight rows, of an MN-major B.
    (Sm90GemmConfig(64, 1, 2, "bfloat16", bias=True, residual=True, low_rank=True), 40, 72, 136),
    (Sm90GemmConfig(16, 1, 2, "bfloat16", panels=2, low_rank=True), 70, 40, 384),
    (Sm90GemmConfig(8, 1, 3, "float16", panels=4, eight_rows=True, low_rank=True), 3, 24, 512),
    (Sm90GemmConfig(64, 2, 2, "bfloat16", b_mn=True, residual=True, low_rank=True), 136, 72, 72),
]


# With the first matrix of the low rank computed in the kernel, of rank 48, one adapter or three: one tile of it and
# several, of eight rows, of panels; written by threads and by TMA, with a residual that TMA loads; of several tiles of
# rows, of two warpgroups, the last of which has none.
REDUCING = [
    (Sm90GemmConfig(16, 1, 2, "bfloat16", panels=2, residual=True, eight_rows=True, streams_b=True), 3, 24, 512, 3),
    (Sm90GemmConfig(32, 1, 2, "float16", panels=4, bias=True), 40, 72, 256, 1),
    (Sm90GemmConfig(64, 1, 4, "bfloat16", bias=True, residual=True), 40, 72, 136, 3),
    (Sm90GemmConfig(48, 1, 3, "bfloat16", swiglu=True, panels=2, eight_rows=True), 7, 40, 256, 1),
    (Sm90GemmConfig(128, 1, 2, "bfloat16", swiglu=True), 64, 88, 192, 1),
    (Sm90GemmConfig(32, 1, 2, "bfloat16", panels=2), 150, 40, 128, 3),
    (Sm90GemmConfig(128, 2, 3, "bfloat16", residual=True), 180, 136, 136, 3),
    (Sm90GemmConfig(128, 2, 2, "bfloat16", swiglu=True), 140, 72, 128, 1),
]
REDUCING = [(config._replace(low_rank=True), *case) for config, *case in REDUCING]


@pytest.mark.parametrize("config, m, n, k, adapters", REDUCING)
@pytest.mark.parametrize("is_own", [False, True], ids=["tiles", "own"])
@pytest.mark.sim
@pytest.mark.sm90
def test_the_low_rank_in_the_same_kernel(rng, config, m, n, k, adapters, is_own):
    """The bits of a product, scale_adapters of it, and a GEMM with their low rank; of tiles of it, or each block's own.

    Of a rank of 40 with one adapter, whose last columns of 48 are none.
    """
    rank = 40 if is_own and adapters == 1 else 48
    fused = with_own_rank(config, rank) if is_own else config._replace(reduces=True)
    rows = 2 * n if config.swiglu else n
    x, weight, b, residual, bias = (
        device.asarray(matrix(rng, shape, config.element)) for shape in ((m, k), (rows, k), (rows, rank), (m, n), n)
    )
    reduction = random_adapters(rng, adapters, rank // adapters, k, m, config.element)
    found, expected = device.xp().full((m, rank), np.nan, x.dtype), reduced(x, reduction)
    outs = [device.xp().full((m, rows), np.nan, x.dtype) for _ in range(2)]
    addends = [residual.copy() if config.residual or config.swiglu else None for _ in range(2)]
    bias = bias if config.bias else None
    gemm_with_config(fused, x, weight, outs[0], bias, addends[0], (found, b), reduction)
    gemm_with_config(config, x, weight, outs[1], bias, addends[1], (expected, b))
    assert_same_bits(found, expected, f"x A^T of {fused}")
    assert_same_bits(*outs, f"{fused}")
    if config.swiglu:
        assert_same_bits(*addends, f"activated by {config}")
    assert not device.to_host(current().own(reduction_counters)).any()


def test_where_one_kernel_makes_both_products(monkeypatch):
    """Blocks of one wave compute up to 48 columns of x A^T themselves. Tiles of more, or of several waves, are those of
    one kernel for up to 64 rows, and for many where they need no further wave: 64 and 4 tiles of 132, 128 and 8."""
    if device.name() != "cpu":
        pytest.skip("counts the blocks of an H200, for arrays of the cpu device")
    monkeypatch.setattr(device, "sm_count", lambda: 132)
    bf16, k = device.dtype("bfloat16"), 2048

    def chosen(most_rows, m, rank, n=1024, ids=None):
        reduction = Reduction(np.zeros((rank, k), bf16), np.ones(1, np.float32), ids)
        x, out, low_rank = np.zeros((m, k), bf16), np.zeros((m, n), bf16), (np.zeros((m, rank), bf16), None)
        return reducing_config(most_rows, x, out, low_rank, reduction)

    assert chosen(64, 64, 64).reduces and chosen(64, 65, 64) is None
    assert chosen(512, 65, 64).reduces and chosen(512, 256, 64).reduces and chosen(512, 512, 64) is None
    for m, rank, own_rank in ((1, 8, 16), (64, 16, 16), (256, 48, 48), (512, 34, 48)):
        assert chosen(512, m, rank).own_rank == own_rank and not chosen(512, m, rank).reduces
    assert chosen(512, 513, 16) is None
    assert chosen(512, 64, 16, ids=np.zeros(64, np.int32)).reduces
    assert chosen(512, 64, 16, 19_456).reduces and chosen(512, 256, 16, 19_456).reduces


def check_swiglu(rng, config, m, n, k):
    """gemm_with_config with SwiGLU: the bits of a product, and of swiglu of it."""
    shapes = (m, k), (2 * n, k), (m, 40), (2 * n, 40)
    x, weight, *pair = (device.asarray(matrix(rng, shape, config.element)) for shape in shapes)
    low_rank = tuple(pair) if config.low_rank else None
    xp = device.xp()
    gate_up, out = xp.full((m, 2 * n), np.nan, x.dtype), xp.full((m, n), np.nan, x.dtype)
    gemm_with_config(config, x, weight, gate_up, residual=out, low_rank=low_rank)
    expected, activated = xp.full((m, 2 * n), np.nan, x.dtype), xp.full((m, n), np.nan, x.dtype)
    plain = Sm90GemmConfig(64, 1, 2, config.element, low_rank=config.low_rank)
    gemm_with_config(plain, x, weight, expected, low_rank=low_rank)
    swiglu(expected, activated, config.activation)
    assert_same_bits(gate_up, expected, f"gate_up of {config}")
    assert_same_bits(out, activated, f"out of {config}")
    exact = swiglu_ref(device.to_host(expected).astype(np.float64), config.activation)
    assert_close(out, exact, scale=float(np.abs(exact).max()), what=f"{config}")


SWIGLU = [
    # Threads write both; the gate's last tile reaches into what it gates.
    (Sm90GemmConfig(32, 1, 2, "bfloat16", swiglu=True), 9, 24, 72),
    (Sm90GemmConfig(64, 1, 2, "float16", swiglu=True, panels=2), 9, 72, 256),
    (Sm90GemmConfig(96, 1, 2, "bfloat16", swiglu=True, panels=4, eight_rows=True), 7, 56, 256),
    (Sm90GemmConfig(128, 1, 2, "bfloat16", swiglu=True, panels=2, eight_rows=True), 7, 88, 128),
    # By TMA, in parts of 64 and of 128 columns; two tiles of rows, two of columns.
    (Sm90GemmConfig(128, 1, 2, "bfloat16", swiglu=True), 70, 88, 64),
    (Sm90GemmConfig(256, 2, 2, "bfloat16", swiglu=True), 5, 136, 72),
    # With a second product of 40 steps.
    (Sm90GemmConfig(64, 1, 2, "float16", swiglu=True, panels=2, low_rank=True), 9, 72, 256),
    (Sm90GemmConfig(96, 1, 2, "bfloat16", swiglu=True, panels=4, eight_rows=True, low_rank=True), 7, 56, 256),
    (Sm90GemmConfig(128, 1, 2, "bfloat16", swiglu=True, low_rank=True), 70, 88, 64),
    # With the GELU, by threads and by TMA.
    (Sm90GemmConfig(32, 1, 2, "bfloat16", swiglu=True, activation=GELU_TANH), 9, 24, 72),
    (Sm90GemmConfig(128, 1, 2, "bfloat16", swiglu=True, activation=GELU_TANH), 70, 88, 64),
]


@pytest.mark.parametrize("config, m, n, k", SWIGLU)
@pytest.mark.sim
@pytest.mark.sm90
def test_swiglu_in_the_simulator(rng, config, m, n, k):
    check_swiglu(rng, config, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "columns, consumers, stages", [(32, 1, 8), (64, 1, 8), (96, 1, 6), (64, 2, 6), (128, 2, 5), (256, 2, 4)]
)
@pytest.mark.sm90
def test_gpu_swiglu(rng, columns, consumers, stages, element):
    for m, n, k in [(1, 3072, 1024), (64, 3072, 1024), (300, 1000, 520), (4097, 3072, 1024)]:
        for activation in ACTIVATIONS:
            config = Sm90GemmConfig(columns, consumers, stages, element, swiglu=True, activation=activation)
            check_swiglu(rng, config, m, n, k)


@pytest.mark.parametrize("config, m, n, k", SIMULATED)
@pytest.mark.sim
@pytest.mark.sm90
def test_simulator(rng, config, m, n, k):
    check_config(rng, gemm_with_config, config, m, n, k)


@pytest.mark.sim
def test_a_config_does_not_change_bits(rng):
    """A row is the same alone and among others, in a narrow tile and a wide one, with A and B exchanged."""
    if device.name() == "cuda":
        pytest.skip("test_gpu_rows has this")
    a, b = matrix(rng, (9, 136), "bfloat16"), matrix(rng, (64, 136), "bfloat16")
    wide, narrow, alone = np.zeros((9, 64), np.float32), np.zeros((9, 64), np.float32), np.zeros((1, 64), np.float32)
    exchanged = np.zeros((64, 32), np.float32)
    gemm_with_config(Sm90GemmConfig(64, 1, 2, "bfloat16", output="float32"), a, b, wide)
    gemm_with_config(Sm90GemmConfig(32, 1, 3, "bfloat16", output="float32"), a, b, narrow)
    gemm_with_config(Sm90GemmConfig(64, 1, 2, "bfloat16", output="float32"), a[4:5].copy(), b, alone)
    padded = np.concatenate([a, np.zeros((23, 136), a.dtype)])
    gemm_with_config(Sm90GemmConfig(32, 1, 2, "bfloat16", output="float32"), b, padded, exchanged)
    assert_same_bits(narrow, wide)
    assert_same_bits(alone[0], wide[4])
    assert_same_bits(exchanged.T[:9].copy(), wide)


def test_every_chosen_config_is_possible():
    """Whatever the shape, the config fits an SM and covers what its layouts ask for."""
    for m in (1, 8, 64, 65, 256, 5000, 16384):
        for n, k in ((1024, 2048), (4096, 1024), (151_936, 1024), (8, 8), (24_576, 4096)):
            for a_mn, b_mn, output in (
                (False, False, "same"),
                (False, True, "same"),
                (True, True, "add"),
                (True, True, "same"),
            ):
                config = best_config(GemmProblem(m, n, k, "bfloat16", a_mn, b_mn, output), 132)
                assert config.layout.nbytes <= 227 * 1024 and config.stages >= 3
                assert config.columns % 64 == 0 or (not b_mn and output == "same")


def types_of(config):
    """Types of gemm_sm90_kernel's arguments, without bias and residual."""
    tensor_map, nothing, pairs, number = "uint8[::1]", "int32[::1]", "int32[:,::1]", "int64"
    rank_operands = tuple_type(LowRank, tensor_map, tensor_map, number) if config.low_rank else number
    if config.reduces or config.own_rank:
        arrays = pairs, "float32[::1]", nothing, number, nothing
        rank_operands = tuple_type(ReducingLowRank, tensor_map, tensor_map, number, tensor_map, *arrays)
    staged = [tensor_map, tensor_map if config.swiglu else nothing]
    outputs = staged if config.staged_columns else [pairs, pairs]
    return [tensor_map, tensor_map, rank_operands, *outputs, nothing, *[number] * 4]


@pytest.mark.parametrize("n, k", [(4096, 1024), (1024, 2048), (1024, 3072)])
def test_weight_gradients_of_16_bits_compile_for_gpus(compile_offline, n, k):
    """The tiles for the layers of Qwen3-0.6B, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config = best_config(GemmProblem(n, k, 16_384, "bfloat16", True, True, "same"), 132)
    troubles = compile_offline(gemm_sm90_kernel(config), types_of(config), (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("m", [1, 64, 16_384])
@pytest.mark.parametrize("b_mn", [False, True])
def test_a_low_rank_compiles_for_gpus(compile_offline, m, b_mn):
    """The tiles for decode and for training, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    problem = GemmProblem(m, 4096, 12_288, "bfloat16", False, b_mn, "same", residual=True)
    config = best_config(problem, 132, low_rank=True)
    troubles = compile_offline(gemm_sm90_kernel(config), types_of(config), (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("m", [1, 64, 256])
@pytest.mark.parametrize("n, k, swiglu", [(6144, 4096, False), (12_288, 4096, True), (4096, 12_288, False)])
@pytest.mark.parametrize("is_own", [False, True], ids=["tiles", "own"])
def test_the_low_rank_in_the_same_kernel_compiles_for_gpus(compile_offline, m, n, k, swiglu, is_own):
    """The tiles for decode of Qwen3-8B, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    problem = GemmProblem(m, n, k, "bfloat16", False, False, "same", residual=n == 4096)
    config = best_config(problem, 132, swiglu, low_rank=True)
    config = with_own_rank(config, 48) if is_own else config._replace(reduces=True)
    troubles = compile_offline(gemm_sm90_kernel(config), types_of(config), (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("m", [1, 64, 16_384])
def test_swiglu_compiles_for_gpus(compile_offline, m):
    """The tiles for decode and for training, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config = best_config(GemmProblem(m, 3072, 1024, "bfloat16", False, False, "same"), 132, True)
    troubles = compile_offline(gemm_sm90_kernel(config), types_of(config), (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m, n, k", SHAPES_OF_MODELS)
def test_gpu(rng, native, dtype, m, n, k):
    check_operators(rng, dtype, m, n, k)


# The weights of Qwen3-0.6B and Qwen3-8B.
WEIGHTS = [
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (6144, 4096),
    (4096, 4096),
    (24_576, 4096),
    (4096, 12_288),
    (151_936, 1024),
]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", WEIGHTS)
def test_gpu_rows(native, n, k):
    """The first rows of a product keep their bits, whatever M is; eager, in a graph, and with SwiGLU in the kernel."""
    import cupy

    def random(*shape):
        return cupy.random.standard_normal(shape, dtype=np.float32).astype(device.dtype("bfloat16"))

    head = n > 100_000
    most = 4096 if head else 16_384
    x, w = random(most, k), random(n, k)
    whole = cupy.zeros((most, n), np.float32 if head else x.dtype)
    gemm.linear(x, w, whole)
    for m in (1, 2, 8, 63, 64, 65, 128, 200, 256, 1000, 4096):
        part = cupy.zeros((m, n), whole.dtype)
        gemm.linear(x[:m], w, part)
        assert_same_bits(part, whole[:m], f"M = {m}")
        if not head:
            part.fill(0)
            gemm.linear_swiglu(x[:m], w, part, cupy.zeros((m, n // 2), x.dtype))
            assert_same_bits(part, whole[:m], f"M = {m} with SwiGLU")
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            gemm.linear(x[:m], w, part)
            graph = stream.end_capture()
            part.fill(0)
            graph.launch()
            stream.synchronize()
        assert_same_bits(part, whole[:m], f"M = {m} in a graph")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 64, 300])
def test_gpu_overlapping(rng, native, m):
    """GEMMs that read each other's results give the same bits with programmatic dependent launch."""
    import cupy

    shapes = (4096, 1024), (1024, 4096)
    up, down = (device.asarray((rng.standard_normal(s) / s[1] ** 0.5).astype(device.dtype("bfloat16"))) for s in shapes)
    narrow, wide = device.asarray(matrix(rng, (m, 1024), "bfloat16")), cupy.zeros((m, 4096), up.dtype)
    first = narrow.copy()

    def chain():
        for _ in range(20):
            gemm.linear(narrow, up, wide)
            gemm.linear(wide, down, narrow, residual=narrow)

    chain()
    expected = narrow.copy()
    assert np.isfinite(device.to_host(expected).astype(np.float32)).all()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, pdl_scope():
        stream.begin_capture()
        for _ in range(3):
            cupy.copyto(narrow, first)
            chain()
        graph = stream.end_capture()
        for _ in range(10):
            wide.fill(np.nan)
            graph.launch()
        stream.synchronize()
    assert_same_bits(narrow, expected, "pdl_scope")
    if device.properties().capability == (9, 0):
        # The first GEMM of each of the three chains follows a copy.
        edges = [edge for edge in edges_of(graph) if edge.source and edge.target]
        gemms = [edge for edge in edges if "gemm_sm90" in edge.source and "gemm_sm90" in edge.target]
        assert len(gemms) == 3 * 39 and all(edge.is_programmatic for edge in gemms)


@pytest.mark.gpu
@pytest.mark.sm90
def test_gpu_tiles(rng):
    """Every config that best_config may choose agrees with every other, bit for bit."""
    import cupy

    a, b = device.asarray(matrix(rng, (300, 512), "bfloat16")), device.asarray(matrix(rng, (640, 512), "bfloat16"))
    first = None
    tiles = [(consumers, columns, 1) for consumers in (1, 2) for columns in (16, 32, 48, 64, 96, 128, 192, 256)]
    tiles += [(1, columns, panels) for columns in (16, 32, 48, 64, 96) for panels in (2, 4)]
    for consumers, columns, panels in tiles:
        out = cupy.zeros((300, 640), a.dtype)
        config = Sm90GemmConfig(columns, consumers, 2 if panels == 4 else 3, "bfloat16", panels=panels)
        gemm_with_config(config, a, b, out)
        first = out if first is None else first
        assert_same_bits(out, first, str(config))
    assert device.sm_count() > 1
    for columns, panels in ((16, 4), (24, 2), (32, 4), (48, 1), (64, 2), (96, 2)):
        out, config = (
            cupy.zeros((8, 640), a.dtype),
            Sm90GemmConfig(columns, 1, 3, "bfloat16", panels=panels, eight_rows=True),
        )
        gemm_with_config(config, a[:8], b, out)
        assert_same_bits(out, first[:8], str(config))
    a, b, first = a[:256].T.copy(), b[:576].T.copy(), None
    for columns, consumers, prefetched in ((256, 2, 0), (256, 2, 64), (256, 1, 128), (128, 2, 128), (64, 2, 64)):
        out = cupy.ones((256, 576), np.float32)
        config = Sm90GemmConfig(columns, consumers, 3, "bfloat16", True, True, "add", prefetched_columns=prefetched)
        for _ in range(2):
            gemm_with_config(config, a, b, out)
        first = out if first is None else first
        assert_same_bits(out, first, str(config))
