import numpy as np
import pytest

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.sm90 import Tile, best_tile, processors, sm90_product, sm90_product_kernel
from rlnumba.kernels.nn.swiglu import swiglu, swiglu_ref
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.launch import pdl_scope
from tests.close import assert_close, assert_same_bits


@pytest.fixture
def ours():
    """The operators of gemm.py take the Hopper kernels, or on another GPU those of gemm/sm80.py."""
    with dispatch.forced("sm90" if dispatch.architecture() == (9, 0) else "sm80"):
        yield


def matrix(rng, shape, dtype):
    return rng.standard_normal(shape).astype(device.dtype(dtype))


def run(rng, tile, m, n, k):
    """Compare one product with float64."""
    a = matrix(rng, (k, m) if tile.a_mn else (m, k), tile.element)
    b = matrix(rng, (k, n) if tile.b_mn else (n, k), tile.element)
    bias, residual = matrix(rng, n, tile.element), matrix(rng, (m, n), tile.element)
    out = device.xp().ones((m, n), a.dtype if tile.output == "same" else np.float32)
    sm90_product(
        tile,
        device.asarray(a),
        device.asarray(b),
        out,
        device.asarray(bias) if tile.bias else None,
        device.asarray(residual) if tile.residual else None,
    )
    a, b, bias, residual = (x.astype(np.float64) for x in (a, b, bias, residual))
    expected = (a.T if tile.a_mn else a) @ (b if tile.b_mn else b.T)
    expected = expected + tile.bias * bias + tile.residual * residual + (tile.output == "add")
    assert_close(out, expected, terms=k, scale=float(np.abs(expected).max()) + np.sqrt(k), what=f"{tile} {m} {n} {k}")


SIMULATED = [
    # More rounds than stages, and ragged edges in every direction.
    (Tile(64, 1, 2, "bfloat16"), 40, 72, 136),
    (Tile(64, 1, 2, "float16", b_mn=True, residual=True), 40, 72, 72),
    (Tile(64, 1, 2, "bfloat16", a_mn=True, b_mn=True, output="add"), 40, 72, 72),
    # Two tiles for one block, and two consumers.
    (Tile(64, 2, 2, "bfloat16", output="float32"), 129, 64, 64),
    # The residual comes by the copy engine, for two tiles of one block, in two parts.
    (Tile(256, 1, 2, "bfloat16", bias=True, residual=True), 70, 256, 64),
    # A quarter, half or all of C comes by the copy engine, for two tiles of one block.
    (Tile(256, 1, 2, "bfloat16", a_mn=True, b_mn=True, output="add", fetched=64), 72, 256, 72),
    (Tile(256, 1, 2, "bfloat16", a_mn=True, b_mn=True, output="add", fetched=128), 72, 256, 72),
    (Tile(64, 2, 2, "bfloat16", a_mn=True, b_mn=True, output="add", fetched=64), 136, 72, 72),
    # Threads write C themselves.
    (Tile(16, 1, 3, "float16", bias=True, residual=True), 5, 40, 200),
    # Several panels a stage, more stages than the ring has, and two tiles for one block.
    (Tile(16, 1, 2, "bfloat16", panels=2), 70, 40, 384),
    (Tile(64, 1, 2, "float16", panels=4, output="float32"), 5, 72, 768),
    # Eight lines of A stand for all.
    (Tile(8, 1, 3, "bfloat16", panels=8, bias=True, residual=True, eight=True), 3, 24, 1024),
    (Tile(32, 1, 2, "float16", eight=True), 8, 40, 72),
    # Of eight rows threads write even what the copy engine could; each has had its share of the residual.
    (Tile(64, 1, 2, "bfloat16", panels=2, residual=True, eight=True), 7, 72, 256),
    (Tile(16, 1, 2, "bfloat16", residual=True), 40, 24, 136),
]


def check_swiglu(rng, tile, m, n, k):
    """sm90_product with SwiGLU: the bits of a product, and of swiglu of it."""
    x, weight = (device.asarray(matrix(rng, shape, tile.element)) for shape in ((m, k), (2 * n, k)))
    xp = device.xp()
    gate_up, out = xp.full((m, 2 * n), np.nan, x.dtype), xp.full((m, n), np.nan, x.dtype)
    sm90_product(tile, x, weight, gate_up, residual=out)
    expected, activated = xp.full((m, 2 * n), np.nan, x.dtype), xp.full((m, n), np.nan, x.dtype)
    sm90_product(Tile(64, 1, 2, tile.element), x, weight, expected)
    swiglu(expected, activated)
    assert_same_bits(gate_up, expected, f"gate_up of {tile}")
    assert_same_bits(out, activated, f"out of {tile}")
    exact = swiglu_ref(device.to_host(expected).astype(np.float64))
    assert_close(out, exact, scale=float(np.abs(exact).max()), what=f"{tile}")


SWIGLU = [
    # Threads write both; the gate's last tile reaches into what it gates.
    (Tile(32, 1, 2, "bfloat16", swiglu=True), 9, 24, 72),
    (Tile(64, 1, 2, "float16", swiglu=True, panels=2), 9, 72, 256),
    (Tile(96, 1, 2, "bfloat16", swiglu=True, panels=4, eight=True), 7, 56, 256),
    (Tile(128, 1, 2, "bfloat16", swiglu=True, panels=2, eight=True), 7, 88, 128),
    # Through the copy engine, in parts of 64 and of 128 columns; two tiles of rows, two of columns.
    (Tile(128, 1, 2, "bfloat16", swiglu=True), 70, 88, 64),
    (Tile(256, 2, 2, "bfloat16", swiglu=True), 5, 136, 72),
]


@pytest.mark.parametrize("tile, m, n, k", SWIGLU)
@pytest.mark.sim
@pytest.mark.sm90
def test_swiglu_in_the_simulator(rng, tile, m, n, k):
    check_swiglu(rng, tile, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "columns, groups, stages", [(32, 1, 8), (64, 1, 8), (96, 1, 6), (64, 2, 6), (128, 2, 5), (256, 2, 4)]
)
@pytest.mark.sm90
def test_gpu_swiglu(rng, columns, groups, stages, element):
    for m, n, k in [(1, 3072, 1024), (64, 3072, 1024), (300, 1000, 520), (4097, 3072, 1024)]:
        check_swiglu(rng, Tile(columns, groups, stages, element, swiglu=True), m, n, k)


@pytest.mark.parametrize("tile, m, n, k", SIMULATED)
@pytest.mark.sim
@pytest.mark.sm90
def test_simulator(rng, tile, m, n, k):
    run(rng, tile, m, n, k)


@pytest.mark.sim
def test_a_tile_does_not_change_bits(rng):
    """A row is the same alone and among others, in a narrow tile and a wide one, with A and B exchanged."""
    if device.name() == "cuda":
        pytest.skip("test_gpu_rows has this")
    a, b = matrix(rng, (9, 136), "bfloat16"), matrix(rng, (64, 136), "bfloat16")
    wide, narrow, alone = np.zeros((9, 64), np.float32), np.zeros((9, 64), np.float32), np.zeros((1, 64), np.float32)
    exchanged = np.zeros((64, 32), np.float32)
    sm90_product(Tile(64, 1, 2, "bfloat16", output="float32"), a, b, wide)
    sm90_product(Tile(32, 1, 3, "bfloat16", output="float32"), a, b, narrow)
    sm90_product(Tile(64, 1, 2, "bfloat16", output="float32"), a[4:5].copy(), b, alone)
    padded = np.concatenate([a, np.zeros((23, 136), a.dtype)])
    sm90_product(Tile(32, 1, 2, "bfloat16", output="float32"), b, padded, exchanged)
    assert_same_bits(narrow, wide)
    assert_same_bits(alone[0], wide[4])
    assert_same_bits(exchanged.T[:9].copy(), wide)


def test_every_chosen_tile_is_possible():
    """Whatever the shape, the tile fits an SM and covers what its layouts ask for."""
    for m in (1, 8, 64, 65, 256, 5000, 16384):
        for n, k in ((1024, 2048), (4096, 1024), (151_936, 1024), (8, 8), (24_576, 4096)):
            for a_mn, b_mn, output in ((False, False, "same"), (False, True, "same"), (True, True, "add")):
                tile = best_tile(m, n, k, "bfloat16", a_mn, b_mn, output, False, False, 132)
                assert tile.shared_bytes <= 227 * 1024 and tile.stages >= 3
                assert tile.columns % 64 == 0 or (not b_mn and output == "same")


@pytest.mark.parametrize("m", [1, 64, 16_384])
def test_swiglu_compiles_for_gpus(compile_offline, m):
    """The tiles for decode and for training, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the numpy device")
    tile = best_tile(m, 3072, 1024, "bfloat16", False, False, "same", False, False, 132, True)
    staged = tile.staged_columns > 0
    maps, nothing, pairs = "uint8[::1]", "int32[::1]", "int32[:,::1]"
    types = [maps, maps, *[maps if staged else nothing] * 2, pairs, nothing, pairs, *["int64"] * 4]
    troubles = compile_offline(sm90_product_kernel(tile), types, (9, 0, "a"))
    assert not troubles, "\n".join(troubles)


SHAPES = [
    (16_384, 1024, 2048),
    (4097, 4096, 1024),
    (1000, 6144, 1024),
    (257, 1024, 3072),
    (64, 152, 1024),
    (1, 4096, 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_gpu(rng, ours, dtype, m, n, k):
    """Forward with bias and residual, dx and dweight against cuBLAS in float32."""
    import cupy

    x, w, dout = (device.asarray(matrix(rng, s, dtype)) for s in ((m, k), (n, k), (m, n)))
    bias, residual = device.asarray(matrix(rng, n, dtype)), device.asarray(matrix(rng, (m, n), dtype))
    wide_x, wide_w, wide_dout = (a.astype(np.float32) for a in (x, w, dout))
    out, logits = cupy.full((m, n), np.nan, x.dtype), cupy.full((m, n), np.nan, np.float32)
    dx, dweight = cupy.full((m, k), np.nan, x.dtype), cupy.ones((n, k), np.float32)
    gemm.linear(x, w, out)
    expected = device.to_host(wide_x @ wide_w.T)
    assert_close(out, expected, terms=k, what="out")
    gemm.linear(x, w, logits)
    assert_close(logits, expected, terms=k, what="float32 out")
    gemm.linear(x, w, out, bias=bias, residual=residual)
    expected = expected + device.to_host(bias.astype(np.float32)) + device.to_host(residual.astype(np.float32))
    assert_close(out, expected, terms=k, what="out with bias and residual")
    gemm.linear_backward_input(dout, w, dx)
    assert_close(dx, device.to_host(wide_dout @ wide_w), terms=n, what="dx")
    gemm.linear_backward_weight(dout, x, dweight)
    assert_close(dweight, device.to_host(wide_dout.T @ wide_x) + 1, terms=m, what="dweight")


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
def test_gpu_rows(ours, n, k):
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
def test_gpu_overlapping(rng, ours, m):
    """Products that take each other's results have the same bits where each begins before the last one's end."""
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


@pytest.mark.gpu
@pytest.mark.sm90
def test_gpu_tiles(rng):
    """Every tile that best_tile may choose agrees with every other, bit for bit."""
    import cupy

    a, b = device.asarray(matrix(rng, (300, 512), "bfloat16")), device.asarray(matrix(rng, (640, 512), "bfloat16"))
    first = None
    tiles = [(groups, columns, 1) for groups in (1, 2) for columns in (16, 32, 48, 64, 96, 128, 192, 256)]
    tiles += [(1, columns, panels) for columns in (16, 32, 48, 64, 96) for panels in (2, 4)]
    for groups, columns, panels in tiles:
        out = cupy.zeros((300, 640), a.dtype)
        tile = Tile(columns, groups, 2 if panels == 4 else 3, "bfloat16", panels=panels)
        sm90_product(tile, a, b, out)
        first = out if first is None else first
        assert_same_bits(out, first, str(tile))
    assert processors() > 1
    for columns, panels in ((16, 4), (24, 2), (32, 4), (48, 1), (64, 2), (96, 2)):
        out, tile = cupy.zeros((8, 640), a.dtype), Tile(columns, 1, 3, "bfloat16", panels=panels, eight=True)
        sm90_product(tile, a[:8], b, out)
        assert_same_bits(out, first[:8], str(tile))
    a, b, first = a[:256].T.copy(), b[:576].T.copy(), None
    for columns, groups, fetched in ((256, 2, 0), (256, 2, 64), (256, 1, 128), (128, 2, 128), (64, 2, 64)):
        out = cupy.ones((256, 576), np.float32)
        tile = Tile(columns, groups, 3, "bfloat16", True, True, "add", fetched=fetched)
        for _ in range(2):
            sm90_product(tile, a, b, out)
        first = out if first is None else first
        assert_same_bits(out, first, str(tile))
