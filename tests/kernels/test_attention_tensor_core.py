import numpy as np
import pytest

from rlnumba import device
from rlnumba.kernels.attention import attention_ref
from rlnumba.kernels.attention_tensor_core import FewTile, Tile, attend, few_rows, many_rows, paged_attend
from rlnumba.kernels.paged_attention import paged_attention_ref
from tests.close import assert_close, assert_same_bits


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Case:
    """Packed sequences, and their keys and values also in blocks of a cache, handed out in random order.

    Slots of the cache that hold no token hold NaN.
    """

    def __init__(self, rng, lengths, heads, kv_heads, head_dim, dtype, block_size=16):
        self.lengths, self.scale, self.block_size = lengths, head_dim**-0.5, block_size
        tokens, kind = sum(lengths), device.dtype(dtype)
        shapes = [(tokens, h, head_dim) for h in (heads, kv_heads, kv_heads)]
        self.q, self.k, self.v = (rng.standard_normal(shape).astype(kind) for shape in shapes)
        self.k *= kind.type(2)
        self.starts = bounds(lengths)
        width = -(-max(lengths) // block_size) + 1
        self.tables = rng.permutation(len(lengths) * width).astype(np.int32).reshape(-1, width)
        self.caches = [np.full((self.tables.size * block_size, kv_heads, head_dim), np.nan, kind) for _ in range(2)]
        for b, length in enumerate(lengths):
            positions = np.arange(length)
            slots = self.tables[b][positions // block_size] * block_size + positions % block_size
            here = slice(self.starts[b], self.starts[b + 1])
            for cache, x in zip(self.caches, (self.k, self.v), strict=True):
                cache[slots] = x[here]

    def packed(self, tile):
        """(out, lse) of attend, on the host."""
        xp = device.xp()
        out, lse = xp.full(self.q.shape, np.nan, self.q.dtype), xp.full(self.q.shape[1::-1], np.nan, np.float32)
        arrays = [device.asarray(x) for x in (self.q, self.k, self.v, self.starts)]
        attend(*arrays, max(self.lengths), self.scale, out, lse, tile)
        return device.to_host(out), device.to_host(lse)

    def check(self, tile):
        """Compare attend with the reference; returns (out, lse)."""
        out, lse = self.packed(tile)
        expected, expected_lse = attention_ref(self.q, self.k, self.v, self.starts, self.scale)
        # Probabilities are rounded to 16 bits before they meet the values.
        assert_close(out, expected, terms=max(self.lengths), scale=2 * float(np.abs(expected).max()), what="out")
        assert_close(lse, expected_lse, terms=self.q.shape[2], scale=2 * float(np.abs(expected_lse).max()), what="lse")
        return out, lse

    def paged(self, tile, begins):
        """out of paged_attend for the positions from begins[b] on of each sequence, on the host, and which rows."""
        rows = [np.arange(self.starts[b] + begin, self.starts[b + 1]) for b, begin in enumerate(begins)]
        lengths = [len(r) for r in rows]
        rows = np.concatenate(rows).astype(np.int64)
        q = self.q[rows]
        out = device.xp().full(q.shape, np.nan, q.dtype)
        arrays = [device.asarray(x) for x in (q, *self.caches)]
        tables = [device.asarray(x) for x in (self.tables, bounds(lengths), np.asarray(self.lengths, np.int32))]
        paged_attend(
            *arrays, self.block_size, *tables, max(lengths), max(self.lengths), self.scale, out, tile
        )  # fmt: skip
        return device.to_host(out), rows


SIMULATED = [
    # Ragged sequences, two segments, a warp without rows.
    (Tile(16, "bfloat16", 2, 16, segment=64), [3, 0, 65], 2, 1),
    # Padded columns, several stages, q in registers, rows of three heads.
    (Tile(24, "float16", 1, 16, 2, True), [18, 1], 3, 1),
]


@pytest.mark.sim
@pytest.mark.parametrize("tile, lengths, heads, kv_heads", SIMULATED)
def test_simulator(rng, tile, lengths, heads, kv_heads):
    if device.name() == "cuda":
        pytest.skip("test_gpu has these")
    Case(rng, lengths, heads, kv_heads, tile.head_dim, tile.element).check(tile)


@pytest.mark.sim
def test_the_cache_gives_the_same_bits_in_the_simulator(rng):
    """A row of packed sequences, of a chunk against the cache, and of decode, whatever the tile."""
    if device.name() == "cuda":
        pytest.skip("test_gpu_bits has this")
    case = Case(rng, [66], 2, 1, 8, "bfloat16")
    expected, _ = case.check(Tile(8, "bfloat16", 1, 32, segment=64))
    for tile in (Tile(8, "bfloat16", 1, 16, 2, block_size=16, segment=64), FewTile(8, "bfloat16", 2, 16, 64)):
        out, rows = case.paged(tile, [62])
        assert_same_bits(out, expected[rows], str(tile))


@pytest.mark.sim
def test_three_segments_in_the_simulator(rng):
    if device.name() == "cuda":
        pytest.skip("test_gpu_bits has this")
    case = Case(rng, [150], 1, 1, 16, "float16", 32)
    out, rows = case.paged(Tile(16, "float16", 1, 16, block_size=32, segment=64), [147])
    lengths = [np.asarray(x, np.int32) for x in ([0, 3], [150])]
    caches = [cache.reshape(-1, 32, 1, 16) for cache in case.caches]
    expected = paged_attention_ref(case.q[rows], *caches, case.tables, *lengths, case.scale)
    assert_close(out, expected, terms=150, scale=2 * float(np.abs(expected).max()))
    again, _ = case.paged(FewTile(16, "float16", 1, 32, 64), [147])
    assert_same_bits(again, out)


def test_every_chosen_tile_is_possible():
    """Whatever the head_dim and the GPU, tiles fit, and a tile's rows of q fit the place that they share."""
    for limit in (99 * 1024, 163 * 1024, 227 * 1024):
        for head_dim in range(8, 264, 8):
            for block_size in (0, 16):
                tile = many_rows(head_dim, "bfloat16", block_size, limit)
                assert tile.shared_bytes + 64 <= limit and tile.rows <= 128
                assert not tile.keeps_q or tile.warp_rows * head_dim <= 16 * 128
            assert few_rows(head_dim, "bfloat16", 16, limit).shared_bytes + 6 * 1024 <= limit
