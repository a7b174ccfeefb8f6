import numpy as np
import pytest

from rlnumba.kernels.gemm.sm80 import (
    SHAPES,
    Tile,
    best_tile,
    product,
    shared_limit,
    sm80_product,
    sm80_product_kernel,
    tiles_for,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits


def matrix(rng, shape, dtype):
    return rng.standard_normal(shape).astype(device.dtype(dtype))


def run(rng, tile, m, n, k):
    """Compare one product with float64."""
    a = matrix(rng, (k, m) if tile.a_mn else (m, k), tile.element)
    b = matrix(rng, (k, n) if tile.b_mn else (n, k), tile.element)
    bias, residual = matrix(rng, n, tile.element), matrix(rng, (m, n), tile.element)
    out = device.xp().ones((m, n), a.dtype if tile.output == "same" else np.float32)
    sm80_product(
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
    # More rounds than stages, ragged edges in every direction, two tiles each way.
    (Tile(32, 32, 2, 1, 32, 3, "bfloat16"), 40, 40, 136),
    (Tile(32, 64, 1, 2, 64, 2, "float16", b_mn=True, residual=True, prefetch=True), 20, 72, 72),
    (Tile(64, 64, 1, 2, 32, 2, "bfloat16", a_mn=True, b_mn=True, output="add"), 72, 64, 40),
    (Tile(16, 32, 1, 1, 64, 4, "bfloat16", output="float32"), 17, 40, 64),
    # A warp's part of C goes in two lines, and the residual has no place of its own.
    (Tile(16, 128, 1, 1, 32, 3, "float16", bias=True, residual=True), 9, 128, 40),
    # One row, and fewer rounds than stages.
    (Tile(16, 32, 1, 2, 128, 4, "bfloat16", bias=True), 1, 24, 8),
]


@pytest.mark.parametrize("tile, m, n, k", SIMULATED)
@pytest.mark.sim
def test_simulator(rng, tile, m, n, k):
    run(rng, tile, m, n, k)


@pytest.mark.sim
def test_a_tile_does_not_change_bits(rng):
    """A row is the same alone and among others, whichever tile it stands in and whichever way B lies."""
    if device.name() == "cuda":
        pytest.skip("test_gpu_rows has this")
    a, b = matrix(rng, (9, 72), "bfloat16"), matrix(rng, (32, 72), "bfloat16")
    one, two, three = (np.zeros((rows, 32), np.float32) for rows in (9, 9, 1))
    sm80_product(Tile(32, 32, 1, 1, 32, 3, "bfloat16", output="float32"), a, b, one)
    across = Tile(16, 64, 1, 1, 64, 2, "bfloat16", b_mn=True, output="float32")
    sm80_product(across, a, b.T.copy(), two)
    sm80_product(Tile(16, 16, 1, 1, 32, 3, "bfloat16", output="float32"), a[4:5].copy(), b, three)
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
def test_every_chosen_tile_is_possible(kinds, limit):
    """Whatever the shape, the tile fits an SM, and a GPU of any size has small and large ones."""
    offered = [tile for tile, _ in tiles_for("bfloat16", *kinds, limit)]
    assert {tile[:5] for tile in offered} <= {shape[:5] for shape in SHAPES}
    assert all(tile.shared_bytes <= limit and tile.stages >= 2 for tile in offered)
    assert max(tile.rows * tile.columns for tile in offered) == 128 * 128
    for m in (1, 8, 64, 65, 256, 5000, 16384):
        for n, k in ((1024, 2048), (4096, 1024), (151_936, 1024), (8, 8), (24_576, 4096)):
            tile = best_tile(m, n, k, "bfloat16", *kinds, 108, limit)
            assert tile in offered and (m < 16_384 or n < 4096 or tile.rows * tile.columns >= 128 * 128)


@pytest.mark.parametrize("architecture, limit", GPUS, ids=str)
@pytest.mark.parametrize("kinds", [KINDS[0], KINDS[3]], ids=str)
def test_kernels_compile_for_gpus(compile_offline, architecture, limit, kinds):
    """The largest tile of each GPU, whose registers are the scarcest, without a spill."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the numpy device")
    tile = best_tile(16_384, 4096, 4096, "bfloat16", *kinds, 108, limit)
    x, c, r = "uint16[:,::1]", "float32[:,::1]", "int32[:,::1]"
    types = [x, x, x if tile.output == "same" else c, "int32[::1]", x if tile.residual else r, *["int64"] * 3]
    troubles = compile_offline(sm80_product_kernel(tile), types, architecture)
    assert not troubles, "\n".join(troubles)


SHAPES_OF_MODELS = [
    (16_384, 1024, 2048),
    (4097, 4096, 1024),
    (1000, 6144, 1024),
    (257, 1024, 3072),
    (64, 152, 1024),
    (1, 4096, 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m, n, k", SHAPES_OF_MODELS)
def test_gpu(rng, dtype, m, n, k):
    """Forward with bias and residual, dx and dweight, against cuBLAS in float32."""
    import cupy

    x, w, dout = (device.asarray(matrix(rng, s, dtype)) for s in ((m, k), (n, k), (m, n)))
    bias, residual = device.asarray(matrix(rng, n, dtype)), device.asarray(matrix(rng, (m, n), dtype))
    wide_x, wide_w, wide_dout = (a.astype(np.float32) for a in (x, w, dout))
    out, logits = cupy.full((m, n), np.nan, x.dtype), cupy.full((m, n), np.nan, np.float32)
    dx, dweight = cupy.full((m, k), np.nan, x.dtype), cupy.ones((n, k), np.float32)
    product(x, w, out)
    expected = device.to_host(wide_x @ wide_w.T)
    assert_close(out, expected, terms=k, what="out")
    product(x, w, logits)
    assert_close(logits, expected, terms=k, what="float32 out")
    product(x, w, out, bias=bias, residual=residual)
    expected = expected + device.to_host(bias.astype(np.float32)) + device.to_host(residual.astype(np.float32))
    assert_close(out, expected, terms=k, what="out with bias and residual")
    product(dout, w, dx, b_mn=True)
    expected = device.to_host(wide_dout @ wide_w)
    assert_close(dx, expected, terms=n, what="dx")
    before = dx.copy()
    product(dout, w, dx, b_mn=True, residual=dx)
    expected = expected + device.to_host(before.astype(np.float32))
    assert_close(dx, expected, terms=n, what="dx, accumulated")
    product(dout, x, dweight, a_mn=True, b_mn=True, add=True)
    assert_close(dweight, device.to_host(wide_dout.T @ wide_x) + 1, terms=m, what="dweight")


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)])
def test_gpu_rows(rng, n, k):
    """The first rows of a product keep their bits, whatever M is."""
    import cupy

    x, w = device.asarray(matrix(rng, (16_384, k), "bfloat16")), device.asarray(matrix(rng, (n, k), "bfloat16"))
    whole = cupy.zeros((16_384, n), x.dtype)
    product(x, w, whole)
    for m in (1, 2, 8, 15, 16, 17, 63, 64, 65, 128, 200, 256, 1000, 4096):
        part = cupy.zeros((m, n), x.dtype)
        product(x[:m], w, part)
        assert_same_bits(part, whole[:m], f"M = {m}")


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_gpu_tiles(rng, kinds):
    """Every tile that best_tile may choose on any GPU agrees with every other, bit for bit."""
    import cupy

    a_mn, b_mn, output, bias, residual = kinds
    m, n, k = 304, 648, 520
    a = device.asarray(matrix(rng, (k, m) if a_mn else (m, k), "bfloat16"))
    b = device.asarray(matrix(rng, (k, n) if b_mn else (n, k), "bfloat16"))
    addends = [device.asarray(matrix(rng, s, "bfloat16")) for s in (n, (m, n))]
    first = None
    for limit in sorted({min(limit, shared_limit()) for _, limit in GPUS}):
        for tile, _ in tiles_for("bfloat16", *kinds, limit):
            out = cupy.ones((m, n), a.dtype if output == "same" else np.float32)
            sm80_product(tile, a, b, out, addends[0] if bias else None, addends[1] if residual else None)
            first = out if first is None else first
            assert_same_bits(out, first, str(tile))
