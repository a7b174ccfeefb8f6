import numpy as np
import pytest

from rlnumba import device
from rlnumba.kernels.attention import attention_ref
from rlnumba.kernels.attention_hopper import ARCHITECTURES, Tile, attention_hopper, attention_hopper_kernel, best_tile
from tests.close import assert_close, assert_same_bits

BF16, F16 = "bfloat16", "float16"
# Types of attention_hopper_kernel's arguments: four tensor maps, arrays, numbers.
FORWARD = ["uint8[::1]"] * 4 + ["int32[:,::1]", "float32[:,::1]", "int32[::1]", "int32[::1]", "int32[:,::1]"]
FORWARD += ["int32"] * 4 + ["float32"]


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed(rng, lengths, heads, kv_heads, head_dim, dtype):
    """q, k, v as NumPy arrays; keys that stand out, so that the softmax is not flat and its reference moves."""
    shapes = [(sum(lengths), h, head_dim) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return [x.astype(device.dtype(dtype)) for x in (q, 4 * k, v)]


def forward(q, k, v, lengths, tile=None):
    """(out, lse) of attention_hopper, from NumPy arrays to arrays of the device."""
    xp = device.xp()
    out = xp.full(q.shape, np.nan, q.dtype)
    lse = xp.full((q.shape[1], q.shape[0]), np.nan, np.float32)
    q, k, v, cu_seqlens = (device.asarray(x) for x in (q, k, v, bounds(lengths)))
    attention_hopper(q, k, v, cu_seqlens, max(lengths, default=0), q.shape[2] ** -0.5, out, lse, tile)
    return out, lse


def check_forward(q, k, v, lengths, tile=None):
    out, lse = forward(q, k, v, lengths, tile)
    expected, expected_lse = attention_ref(q, k, v, bounds(lengths), q.shape[2] ** -0.5)
    assert_close(out, expected, terms=max(lengths), what="out")
    assert_close(lse, expected_lse, terms=q.shape[2], what="lse")


@pytest.mark.sim
@pytest.mark.parametrize(
    "lengths, heads, kv_heads, head_dim, tile",
    [
        # Two segments, rows that end inside a tile, two heads side by side.
        ([70, 0, 3], 2, 1, 16, Tile(16, BF16, stages=2, segment=64)),
        # Three segments for one of two neighbouring blocks of tokens, consumers that take turns, and 80 columns.
        ([130], 1, 1, 80, Tile(80, F16, stages=2, paired=False, ordered=True, segment=64)),
    ],
    ids=["paired", "neighbours"],
)
def test_simulator(rng, lengths, heads, kv_heads, head_dim, tile):
    if device.name() == "cuda":
        pytest.skip("test_gpu has these")
    check_forward(*packed(rng, lengths, heads, kv_heads, head_dim, tile.element), lengths, tile)


@pytest.mark.parametrize("head_dim, group, paged", [(128, 2, False), (128, 1, True), (256, 2, False), (80, 3, True)])
def test_kernels_compile_for_gpus(compile_offline, head_dim, group, paged):
    if device.name() != "numpy":
        pytest.skip("compiles without a GPU, from the numpy device")
    tile = best_tile(head_dim, BF16, group, paged, 16 if paged else 64)
    assert tile.shared_bytes <= 227 * 1024
    troubles = compile_offline(attention_hopper_kernel(tile), FORWARD, ARCHITECTURES[0])
    assert not troubles, "\n".join(troubles)


LENGTHS = [1, 63, 64, 65, 0, 127, 128, 129, 700, 1024, 1025, 2100]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(16, 8, 128), (9, 3, 64), (6, 6, 48), (8, 2, 80), (4, 1, 96), (4, 2, 256)]
)
def test_gpu(rng, heads, kv_heads, head_dim, dtype):
    check_forward(*packed(rng, LENGTHS, heads, kv_heads, head_dim, dtype), LENGTHS)


@pytest.mark.sim
def test_neighbours_may_be_infinite(rng):
    """What lies behind a sequence's last key in the same tile is another sequence's, and not used."""
    if device.name() == "numpy":
        pytest.skip("needs the kernel")
    q, k, v = packed(rng, [20, 30], 2, 1, 16, BF16)
    before = device.to_host(forward(q, k, v, [20, 30])[0])
    k[20:], v[20:] = np.nan, np.inf
    assert_same_bits(forward(q, k, v, [20, 30])[0][:20].copy(), before[:20])
