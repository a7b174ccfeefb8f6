import numpy as np
import pytest

from rlnumba.kernels.attention.paged import paged_attention_ref
from rlnumba.kernels.attention.reference import attention_ref
from rlnumba.kernels.attention.sequences import PackedSequences, PagedSequences
from rlnumba.kernels.attention.sm80_decode import (
    Sm80DecodeConfig,
    decode_config,
    merge_segments_kernel,
    paged_attention_sm80,
    sm80_decode_kernel,
)
from rlnumba.kernels.attention.sm80_forward import (
    Sm80AttentionConfig,
    attention_config,
    attention_sm80,
    sm80_attention_kernel,
)
from rlnumba.kernels.attention.sm80_tiles import PagedBatch
from rlnumba.kernels.attention.split_kv import AttentionWorkspace
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from rlnumba.runtime.context import current
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

    def packed(self, config):
        """(out, lse) of attention_sm80, on the host."""
        xp = device.xp()
        out, lse = xp.full(self.q.shape, np.nan, self.q.dtype), xp.full(self.q.shape[1::-1], np.nan, np.float32)
        q, k, v, starts = (device.asarray(x) for x in (self.q, self.k, self.v, self.starts))
        attention_sm80(q, k, v, PackedSequences(starts, max(self.lengths)), self.scale, out, lse, config)
        return device.to_host(out), device.to_host(lse)

    def check(self, config):
        """Compare attention_sm80 with the reference; returns (out, lse)."""
        out, lse = self.packed(config)
        expected, expected_lse = attention_ref(self.q, self.k, self.v, self.starts, self.scale)
        # Probabilities are rounded to 16 bits before they meet the values.
        assert_close(out, expected, terms=max(self.lengths), scale=2 * float(np.abs(expected).max()), what="out")
        assert_close(lse, expected_lse, terms=self.q.shape[2], scale=2 * float(np.abs(expected_lse).max()), what="lse")
        return out, lse

    def paged(self, config, begins):
        """out of paged_attention_sm80 for positions from begins[b] on of each sequence, on the host, and which rows."""
        rows = [np.arange(self.starts[b] + begin, self.starts[b + 1]) for b, begin in enumerate(begins)]
        lengths = [len(r) for r in rows]
        rows = np.concatenate(rows).astype(np.int64)
        q = self.q[rows]
        out = device.xp().full(q.shape, np.nan, q.dtype)
        arrays = [device.asarray(x) for x in (q, *self.caches)]
        tables = [device.asarray(x) for x in (bounds(lengths), np.asarray(self.lengths, np.int32), self.tables)]
        sequences = PagedSequences(*tables, max(lengths), max(self.lengths))
        paged_attention_sm80(*arrays, self.block_size, sequences, self.scale, out, config)
        return device.to_host(out), rows


SIMULATED = [
    # Ragged sequences, two segments, a warp without rows.
    (Sm80AttentionConfig(16, "bfloat16", 2, 16, segment=64), [3, 0, 65], 2, 1),
    # Padded columns, several stages, q in registers, rows of three heads.
    (Sm80AttentionConfig(24, "float16", 1, 16, 2, True), [18, 1], 3, 1),
]


@pytest.mark.sim
@pytest.mark.parametrize("config, lengths, heads, kv_heads", SIMULATED)
def test_simulator(rng, config, lengths, heads, kv_heads):
    Case(rng, lengths, heads, kv_heads, config.head_dim, config.element).check(config)


@pytest.mark.sim
def test_the_cache_gives_the_same_bits_in_the_simulator(rng):
    """A row of packed sequences, of a chunk against the cache, and of decode, whatever the config."""
    case = Case(rng, [66], 2, 1, 8, "bfloat16")
    expected, _ = case.check(Sm80AttentionConfig(8, "bfloat16", 1, 32, segment=64))
    for config in (
        Sm80AttentionConfig(8, "bfloat16", 1, 16, 2, block_size=16, segment=64),
        Sm80DecodeConfig(8, "bfloat16", 2, 16, 64),
    ):
        out, rows = case.paged(config, [62])
        assert_same_bits(out, expected[rows], str(config))


@pytest.mark.sim
def test_three_segments_in_the_simulator(rng):
    case = Case(rng, [150], 1, 1, 16, "float16", 32)
    out, rows = case.paged(Sm80AttentionConfig(16, "float16", 1, 16, block_size=32, segment=64), [147])
    lengths = [np.asarray(x, np.int32) for x in ([0, 3], [150])]
    caches = [cache.reshape(-1, 32, 1, 16) for cache in case.caches]
    expected = paged_attention_ref(case.q[rows], *caches, case.tables, *lengths, case.scale)
    assert_close(out, expected, terms=150, scale=2 * float(np.abs(expected).max()))
    again, _ = case.paged(Sm80DecodeConfig(16, "float16", 1, 32, 64), [147])
    assert_same_bits(again, out)


def test_every_chosen_config_is_possible():
    """Whatever the head_dim and the GPU, configs fit, and rows of q fit the shared memory that they reuse."""
    for limit in (99 * 1024, 163 * 1024, 227 * 1024):
        for head_dim in range(8, 264, 8):
            for block_size in (0, 16):
                config = attention_config(head_dim, "bfloat16", block_size, limit)
                assert config.shared_bytes + 64 <= limit and config.rows <= 128
                assert not config.q_in_registers or config.warp_rows * head_dim <= 16 * 128
            assert decode_config(head_dim, "bfloat16", 16, limit).shared_bytes + 6 * 1024 <= limit


# Compute capabilities, and the shared memory of a block there.
GPUS = [((8, 0), 163 * 1024), ((8, 6), 99 * 1024), ((9, 0), 227 * 1024), ((12, 0), 99 * 1024)]


@pytest.mark.parametrize("architecture, limit", GPUS, ids=str)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_kernels_compile_for_gpus(compile_offline, architecture, limit, head_dim):
    """Without a spill, whatever the GPU."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    x, f, i = "uint16[:,:,::1]", "float32[:,::1]", "int32[::1]"
    batch, troubles = tuple_type(PagedBatch, i, i, i, "int64"), []
    for block_size in (0, 16):
        config = attention_config(head_dim, "bfloat16", block_size, limit)
        types = [x, x, x, batch, "float32", f, i, x, f]
        troubles += compile_offline(sm80_attention_kernel(config), types, architecture)
    types = [x, x, x, batch, "int64", "float32", f, f, x]
    kernel = sm80_decode_kernel(decode_config(head_dim, "bfloat16", 16, limit))
    troubles += compile_offline(kernel, types, architecture)
    troubles += compile_offline(merge_segments_kernel(1024), [i, i, "int64", f, f, x], architecture)
    assert not troubles, "\n".join(troubles)


SHAPES = [(16, 8, 128), (6, 6, 48), (8, 2, 80), (9, 3, 64), (4, 1, 256), (12, 1, 96), (4, 2, 72)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gpu(rng, shape, dtype):
    lengths = [1, 7, 64, 129, 500, 1000, 2395] if shape == (16, 8, 128) else [1, 31, 0, 63, 64, 65, 200, 1025]
    case = Case(rng, lengths, *shape, dtype)
    case.check(None)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gpu_bits(rng, shape):
    """Every config, with the keys packed or in a cache, and decode: the bits of a row are the same."""
    case = Case(rng, [2500, 33, 1, 64, 1024, 1025], *shape, "bfloat16")
    head_dim, group, everything = shape[2], shape[0] // shape[1], [0] * 6
    expected, expected_lse = case.packed(None)
    for limit in (99 * 1024, 163 * 1024):
        out, lse = case.packed(attention_config(head_dim, "bfloat16", 0, limit))
        assert_same_bits(out, expected, f"config for {limit} bytes")
        assert_same_bits(lse, expected_lse, f"lse, config for {limit} bytes")
    paged = attention_config(head_dim, "bfloat16", 16, 99 * 1024)
    for begins in (everything, [2400, 32, 0, 1, 1000, 1024], [2499, 0, 0, 63, 1023, 500]):
        out, rows = case.paged(paged, begins)
        assert_same_bits(out, expected[rows], f"chunks from {begins}")
    few = max(1, 16 // group)
    for tokens in {1, few}:
        for stages in (1, 2):
            begins = [max(length - tokens, 0) for length in case.lengths]
            out, rows = case.paged(Sm80DecodeConfig(head_dim, "bfloat16", stages, 16), begins)
            assert_same_bits(out, expected[rows], f"decode of {tokens} tokens, {stages} stages")


@pytest.mark.gpu
def test_gpu_many_blocks_share_slots(rng):
    """More blocks with several segments than slots for their totals, twice: the same bits, and all slots free again."""
    case = Case(rng, [2048, 3000, 1500, 4096], 16, 8, 128, "bfloat16")
    first, second = case.packed(None), case.packed(None)
    assert_same_bits(second[0], first[0])
    assert not device.to_host(current().own(AttentionWorkspace).counters.array).any()


@pytest.mark.gpu
def test_gpu_graph_follows_its_arrays(rng):
    """A captured decode step: contexts move from one segment to three, and slots without a sequence give zeros."""
    import cupy

    case = Case(rng, [3000, 40, 1100, 129], 16, 8, 128, "bfloat16")
    expected, _ = case.packed(None)
    q, out = cupy.zeros((4, 16, 128), case.q.dtype), cupy.zeros((4, 16, 128), case.q.dtype)
    caches, tables = [device.asarray(x) for x in case.caches], device.asarray(case.tables)
    ends, starts = cupy.full(4, 7, np.int32), cupy.arange(5, dtype=np.int32)
    sequences = PagedSequences(starts, ends, tables, 1, 3000)

    def step():
        paged_attention_sm80(q, *caches, 16, sequences, case.scale, out)

    stream = cupy.cuda.Stream(non_blocking=True)
    step()
    device.synchronize()
    with stream:
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    for contexts in ([7, 7, 7, 7], [3000, 40, 1100, 129], [1024, 1, 1025, 64], [2049, 0, 1, 128]):
        rows = [case.starts[b] + max(context - 1, 0) for b, context in enumerate(contexts)]
        q[...], ends[...] = device.asarray(case.q[rows]), device.asarray(np.asarray(contexts, np.int32))
        out.fill(np.nan)
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        wanted = expected[rows].copy()
        wanted[np.asarray(contexts) == 0] = 0
        assert_same_bits(out, wanted, f"contexts {contexts}")
