import functools

import numpy as np
import pytest

from rlnumba.kernels.attention.reference import attention_ref
from rlnumba.kernels.attention.scheduler import Pages, PrefillBatch, list_work_items_kernel
from rlnumba.kernels.attention.sequences import PackedSequences, PagedSequences, SharedPrefixes
from rlnumba.kernels.attention.sm90_config import AttentionConfig, attention_config
from rlnumba.kernels.attention.sm90_decode import producer
from rlnumba.kernels.attention.sm90_decode.config import DecodeBatch, DecodeConfig, decode_config
from rlnumba.kernels.attention.sm90_decode.consumer import column_sum_function
from rlnumba.kernels.attention.sm90_decode.kernel import paged_attention_sm90_kernel
from rlnumba.kernels.attention.sm90_forward import ARCHITECTURES, attention_sm90, attention_sm90_kernel
from rlnumba.kernels.attention.sm90_paged import DecodePlan, paged_attention_sm90, plan_decode
from rlnumba.kernels.attention.softmax import row_sum
from rlnumba.kernels.attention.split_kv import AttentionWorkspace, Partials
from rlnumba.kernels.ptx.shared_memory import shared_address
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize
from tests.close import assert_close, assert_same_bits

pytestmark = pytest.mark.sm90
BF16, F16 = "bfloat16", "float16"
# Types of attention_sm90_kernel's arguments: four tensor maps, arrays, numbers.
FORWARD = ["uint8[::1]"] * 4 + ["int32[:,::1]", "float32[:,::1]"]
FORWARD += [tuple_type(PrefillBatch, "int32[::1]", "int32[::1]", "int32", "int32")]
FORWARD += [tuple_type(Pages, "int32[:,::1]", "int32"), "int32", "float32"]
# Those of paged_attention_sm90_kernel's behind its queries.
PAGED = ["uint8[::1]", "uint8[::1]"]
PAGED += [tuple_type(DecodeBatch, "int32[::1]", "int32[::1]", "int32[:,::1]", "int32[::1]", *["int32"] * 5)]
PAGED += [tuple_type(Pages, "int32[:,::1]", "int32"), tuple_type(Partials, *["float32[::1]"] * 3, "int32", "int32")]
PAGED += ["int32[:,::1]", "float32[:,::1]", "float32"]
DECODE = ["uint8[::1]", *PAGED]


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed(rng, lengths, heads, kv_heads, head_dim, dtype):
    """q, k, v as NumPy arrays; keys that stand out, so that the softmax is not flat and row maxima are updated."""
    shapes = [(sum(lengths), h, head_dim) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return [x.astype(device.dtype(dtype)) for x in (q, 4 * k, v)]


def forward(q, k, v, lengths, config=None):
    """(out, lse) of attention_sm90, from NumPy arrays to arrays of the device."""
    xp = device.xp()
    out = xp.full(q.shape, np.nan, q.dtype)
    lse = xp.full((q.shape[1], q.shape[0]), np.nan, np.float32)
    q, k, v, cu_seqlens = (device.asarray(x) for x in (q, k, v, bounds(lengths)))
    sequences = PackedSequences(cu_seqlens, max(lengths, default=0))
    attention_sm90(q, k, v, sequences, q.shape[2] ** -0.5, out, lse, config)
    return out, lse


def check_forward(q, k, v, lengths, config=None):
    out, lse = forward(q, k, v, lengths, config)
    expected, expected_lse = attention_ref(q, k, v, bounds(lengths), q.shape[2] ** -0.5)
    assert_close(out, expected, terms=max(lengths), what="out")
    assert_close(lse, expected_lse, terms=q.shape[2], what="lse")


@pytest.mark.sim
@pytest.mark.parametrize(
    "lengths, heads, kv_heads, head_dim, config",
    [
        # Two segments, rows that end inside a tile, two heads side by side.
        ([70, 0, 3], 2, 1, 16, AttentionConfig(16, BF16, stages=2, segment=64)),
        # Three segments for one of two neighbouring blocks of tokens, and 80 columns.
        ([130], 1, 1, 80, AttentionConfig(80, F16, stages=2, paired=False, segment=64)),
    ],
    ids=["paired", "neighbours"],
)
def test_simulator(rng, lengths, heads, kv_heads, head_dim, config):
    check_forward(*packed(rng, lengths, heads, kv_heads, head_dim, config.element), lengths, config)


class Cache:
    """Packed sequences whose keys and values lie in a block cache too, blocks in random order, NaN in free slots.

    common: tokens that all sequences share with the first, a multiple of the block size, in the same blocks.
    flat: scores near -log(flat), so that lse is near 0 for as many keys, and shows the last bit of a sum.
    """

    def __init__(self, rng, lengths, heads, kv_heads, head_dim, dtype, block_size=16, common=0, segment=1024, flat=0):
        self.lengths, self.starts, self.scale, self.segment = lengths, bounds(lengths), head_dim**-0.5, segment
        self.q, k, v = packed(rng, lengths, heads, kv_heads, head_dim, dtype)
        if flat:
            k *= k.dtype.type(0.125)
            self.q[:, :, 0], k[:, :, 0] = 1, -np.log(flat) / self.scale
        for start in self.starts[1:-1]:
            for x in (self.q, k, v):
                x[start : start + common] = x[:common]
        width = -(-max(lengths) // block_size) + 1
        self.tables = rng.permutation(len(lengths) * width).astype(np.int32).reshape(-1, width)
        self.tables[:, : common // block_size] = self.tables[0, : common // block_size]
        self.caches = [np.full((self.tables.size, block_size, kv_heads, head_dim), np.nan, x.dtype) for x in (k, v)]
        for b, length in enumerate(lengths):
            positions = np.arange(length)
            blocks = self.tables[b][positions // block_size]
            for cache, x in zip(self.caches, (k, v), strict=True):
                cache[blocks, positions % block_size] = x[self.starts[b] : self.starts[b + 1]]
        self.group, self.element, self.box = heads // kv_heads, dtype, min(block_size, 64)
        self.packed = self.q, k, v
        self.caches = [device.asarray(cache) for cache in self.caches]

    @functools.cached_property
    def expected(self):
        """(out, lse) of the packed form, on the host."""
        config = attention_config(self.q.shape[2], self.element, self.group)._replace(segment=self.segment)
        return [device.to_host(x) for x in forward(*self.packed, self.lengths, config)]

    def rows(self, order, begins, ends):
        spans = [self.starts[b] + np.arange(x, y) for b, x, y in zip(order, begins, ends, strict=True)]
        return np.concatenate(spans)

    def paged(
        self, order, begins, ends, max_context=None, common=None, group_sizes=None, blocks=None, max_leading=None,
        tokens=1,
    ):  # fmt: skip
        """(out, lse), on the host, of positions begins[i] .. ends[i] of sequence order[i]; ends 0: one without keys.

        tokens: of a sequence in one work item.
        """
        lengths = [max(end - begin, 1) for begin, end in zip(begins, ends, strict=True)]
        rows = self.rows(order, begins, np.add(begins, lengths))
        head_dim, most = self.q.shape[2], max(group_sizes or [1])
        config = decode_config(head_dim, self.element, self.group, self.box, most, tokens)
        prefill = attention_config(head_dim, self.element, self.group, True, self.box)
        q, *arrays = (
            device.asarray(x) for x in (self.q[rows], bounds(lengths), np.array(ends, np.int32), self.tables[order])
        )
        groups = None
        if group_sizes:
            groups = SharedPrefixes(*(device.asarray(np.array(x, np.int32)) for x in (common, group_sizes)), most)
        out = device.xp().full(q.shape, np.nan, q.dtype)
        lse = device.xp().zeros((q.shape[1], len(rows)), np.float32)
        sequences = PagedSequences(*arrays, max(lengths), max_context or max(ends), groups)
        sequences = self.planned(q, sequences, config._replace(segment=self.segment), blocks, max_leading)
        prefill = prefill._replace(segment=self.segment)
        paged_attention_sm90(q, self.caches, sequences, self.scale, out, lse, prefill)
        assert not device.to_host(current().own(AttentionWorkspace).counters.array).any()
        return device.to_host(out), device.to_host(lse)

    def planned(self, q, sequences, *options):
        """PagedSequences with a plan of their own, by these options of plan_decode."""
        _, block_size, kv_heads, head_dim = self.caches[0].shape
        heads = self.element, q.shape[1], kv_heads, head_dim, block_size
        return sequences._replace(plan=plan_decode(heads, sequences, *options))

    def compare(self, order, begins, ends, max_context=None, **options):
        """paged() gives the bits of the packed form."""
        tokens = [max(end - begin, 1) for begin, end in zip(begins, ends, strict=True)]
        rows, empty = self.rows(order, begins, np.add(begins, tokens)), np.repeat(ends, tokens) == 0
        expected, expected_lse = self.expected[0][rows], np.where(empty, np.float32(0), self.expected[1][:, rows])
        expected[empty] = 0
        out, lse = self.paged(order, begins, ends, max_context, **options)
        assert_same_bits(lse, expected_lse, f"lse of {order} {begins} {ends}")
        assert_same_bits(out, expected, f"{order} {begins} {ends}")


@specialize
def sums_kernel(rows):
    """One warpgroup: the sums of (32, rows) partial sums by decode's function and by that of prefill."""
    column_sums, columns = column_sum_function(rows), rows // 4

    @cuda.jit
    def sums_kernel(sums, out):
        thread = np.int32(cuda.threadIdx.x)
        warp, group_lane, pair = thread >> 5, (thread & 31) >> 2, 2 * (thread & 3)
        memory = shared_address(cuda.shared.array(0, np.uint8))
        partial_sums = cuda.local.array(columns, np.float32)
        for i in range(columns):
            partial_sums[i] = sums[warp * 8 + group_lane, i // 2 * 8 + pair + i % 2]
        column_sums(partial_sums, memory, warp, group_lane, pair)
        for i in range(columns):
            out[0, i // 2 * 8 + pair + i % 2] = partial_sums[i]
        mine = cuda.local.array(16, np.float32)
        for column in range(0, rows, 2):
            for i in range(16):
                mine[i] = sums[i % 8 // 2 * 8 + pair + i % 2, column + i // 8]
            for half in range(2):
                out[1, column + half] = row_sum(mine, half)

    return sums_kernel


@pytest.mark.sim
def test_both_forms_add_up_in_one_order(rng):
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    sums = rng.random((32, 16)).astype(np.float32)
    out = device.xp().zeros((2, 16), np.float32)
    launch(sums_kernel(16), 1, 128, device.asarray(sums), out, shared=128 * 16)
    # l[w, g] of the definition; t_g, then the sum over g by halves.
    l = sums.reshape(4, 8, 16)
    t = (l[0] + l[1]) + (l[2] + l[3])
    pairs = t[0::2] + t[1::2]
    expected = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    out = device.to_host(out)
    assert_same_bits(out[0], expected, "decode")
    assert_same_bits(out[1], expected, "packed")


@pytest.mark.sim
def test_paged_bits_in_the_simulator(rng):
    """Decode of one and of two tokens, a slot without keys, and a chunk: the rows of the packed form."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    cache = Cache(rng, [100, 20], 2, 1, 16, F16, segment=64, flat=70)
    cache.compare([0, 1, 0, 0], [98, 19, 5, 60], [100, 20, 0, 64], blocks=2)
    cache.compare([1, 0], [19, 59], [20, 100], max_context=112)


@pytest.mark.sim
@pytest.mark.parametrize("heads, tokens", [(3, 8), (2, 8), (4, 8)])
def test_wide_work_items_in_the_simulator(rng, heads, tokens):
    """Several query tokens of a sequence in one work item, as in a step with drafts, some sequences with fewer."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    cache = Cache(rng, [150, 70, 9], heads, 1, 16, BF16, segment=64, flat=100)
    config = decode_config(16, BF16, heads, 16, 1, tokens)
    assert config.rows == -(-heads * tokens // 8) * 8
    cache.compare([0, 1, 2, 1], [142, 65, 8, 60], [150, 70, 9, 0], blocks=2, tokens=tokens)


@pytest.mark.sim
@pytest.mark.parametrize("max_leading", [1, 2, 4])
def test_leading_spans_in_the_simulator(rng, max_leading):
    """First work items of as many segments as a sequence has, fewer, or one."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    cache = Cache(rng, [290, 130, 70], 2, 1, 16, BF16, segment=64, flat=200)
    cache.compare([0, 1, 2, 0, 0], [289, 127, 69, 60, 255], [290, 129, 70, 61, 257], blocks=2, max_leading=max_leading)


@pytest.mark.sim
@pytest.mark.parametrize("blocks", [1, 2])
def test_groups_in_the_simulator(rng, monkeypatch, blocks):
    """A group's whole segments are read once; the items of its members resume that partial, or merge with it."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    cache = Cache(rng, [10, 100, 81], 3, 1, 24, BF16, common=0, segment=64)
    cache.tables[2, :5] = cache.tables[1, :5]
    step = [0, 1, 2], [9, 99, 80], [10, 100, 81], 112
    looks, counted = [], producer.load_acquire

    def looked(counters, index):
        looks.append(counted(counters, index))
        return looks[-1]

    if device.name() == "sim":
        # Which block looks when depends on the order of threads.
        monkeypatch.setattr("rlnumba.runtime.simulator.SEED", None)
        monkeypatch.setattr(producer, "load_acquire", looked)
    grouped = cache.paged(*step, common=[0, 80, 80], group_sizes=[1, 2, 0], blocks=blocks)
    for actual, expected in zip(grouped, cache.paged(*step), strict=True):
        assert_same_bits(actual, expected)
    if device.name() == "sim":
        # One block looks for the first member's item while the shared one is computed, for the second's when it is
        # done; two blocks look too early both times.
        assert looks == ([0, 1] if blocks == 1 else [0, 0])


@pytest.mark.sim
@pytest.mark.parametrize("grouped", [False, True])
def test_work_items_are_listed(rng, grouped):
    """More sequences than threads; some without keys, some with more queries than an item has; two leading segments, or
    three where the third is the last and short."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    segment, max_leading, rows, sequences = 64, 2, 8, 300
    config = DecodeConfig(64, BF16, rows, segment=segment, grouped=grouped)
    contexts = rng.integers(0, 400, sequences)
    lengths = np.where(contexts > 0, 1 if grouped else rng.integers(1, 7, sequences), 1)
    common, group_sizes = np.zeros(sequences, np.int64), np.ones(sequences, np.int64)
    for first in range(0, 240, 6) if grouped else ():
        group = slice(first, first + 4)
        contexts[group] += 70
        common[group], group_sizes[group] = contexts[group].min() - 1, (4, 0, 0, 0)
    starts, shared, own = bounds(lengths), [], []
    for b in range(sequences):
        segments = max(-(-contexts[b] // segment), 1)
        in_common = common[b] // segment
        leading = min(max_leading, in_common or segments)
        # A short last segment is no item of its own.
        leading += not in_common and segments == leading + 1 and contexts[b] - leading * segment <= segment // 4
        for split in range(segments - leading + 1):
            first_key = (split - 1 + leading) * segment if split else 0
            keys = min(contexts[b] - first_key, segment if split else leading * segment)
            of_group = first_key < in_common * segment
            splits = segments - leading + 1
            item = (-(-keys // 64), b, split, first_key, starts[b], lengths[b], contexts[b], 0, splits)
            if of_group and group_sizes[b]:
                shared.append((*item[:7], group_sizes[b], splits))
            elif not of_group and (lengths[b] * 2 <= rows or not contexts[b]):
                own.append(item)
    starts, contexts, *groups = (device.asarray(x.astype(np.int32)) for x in (starts, contexts, common, group_sizes))
    most = (int(lengths.max()), int(contexts.max()))
    sequences = PagedSequences(starts, contexts, None, *most, SharedPrefixes(*groups, 4) if grouped else None)
    plan = plan_decode((BF16, 4, 2, 64, 16), sequences, config, 1, max_leading)
    items = device.to_host(plan.items)
    assert items[0, 0] == len(shared + own)
    assert (items[1 : 1 + len(shared + own)] == np.array(shared + own)).all()


def test_a_plan_of_another_call_is_refused():
    xp = device.xp()
    q, cache = xp.zeros((2, 4, 16), np.float16), xp.zeros((4, 16, 4, 16), np.float16)
    numbers, tables = xp.zeros(2, np.int32), xp.zeros((2, 4), np.int32)
    made_for = ("float16", 4, 4, 16, 16, 2, 1, 32, 1)
    plan = DecodePlan(made_for, DecodeConfig(16, "float16"), 1, 1, 1, 1, 1, None)
    with pytest.raises(ValueError, match="the plan is for .* not for "):
        paged_attention_sm90(q, (cache, cache), PagedSequences(numbers, numbers, tables, 1, 64, plan=plan), 1.0, q)


@pytest.mark.parametrize("head_dim, group, paged", [(128, 2, False), (128, 1, True), (256, 2, False), (80, 3, True)])
def test_kernels_compile_for_gpus(compile_offline, head_dim, group, paged):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config = attention_config(head_dim, BF16, group, paged, 16 if paged else 64)
    assert config.layout.nbytes <= 227 * 1024
    troubles = compile_offline(attention_sm90_kernel(config), FORWARD, ARCHITECTURES[0])
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize(
    "head_dim, group, group_sizes, tokens", [(128, 2, 1, 1), (128, 4, 8, 1), (256, 8, 1, 1), (64, 3, 1, 8)]
)
def test_decode_compiles_for_gpus(compile_offline, head_dim, group, group_sizes, tokens):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config = decode_config(head_dim, BF16, group, 16, group_sizes, tokens)
    assert config.layout.nbytes * config.blocks <= 227 * 1024
    troubles = compile_offline(paged_attention_sm90_kernel(config), DECODE, ARCHITECTURES[0])
    assert not troubles, "\n".join(troubles)


@pytest.mark.sim
def test_the_list_of_work_items_is_not_left():
    """Contexts that are longer than it was made for: five items of two sequences, of which it holds three."""
    memory = device.asarray(np.full((8, 9), -7, np.int32))
    arrays = (device.asarray(np.int32(x)) for x in ([0, 1, 2], [3000, 1500], [0], [0]))
    launch(list_work_items_kernel(16, 1024, False, 0), 1, 32, *arrays, np.int32(1), np.int32(1), memory[:4])
    listed = device.to_host(memory)
    assert listed[0, 0] == 3 and listed[1:4, 1:3].tolist() == [[0, 0], [0, 1], [0, 2]] and (listed[4:] == -7).all()


@pytest.mark.parametrize("grouped", [False, True])
def test_listing_work_items_compiles_for_gpus(compile_offline, grouped):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    types = ["int32[::1]"] * 4 + ["int32"] * 2 + ["int32[:,::1]"]
    troubles = compile_offline(list_work_items_kernel(16, 1024, grouped, 0), types, ARCHITECTURES[0])
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
    if device.name() == "cpu":
        pytest.skip("needs the kernel")
    q, k, v = packed(rng, [20, 30], 2, 1, 16, BF16)
    before = device.to_host(forward(q, k, v, [20, 30])[0])
    k[20:], v[20:] = np.nan, np.inf
    assert_same_bits(forward(q, k, v, [20, 30])[0][:20].copy(), before[:20])


SHAPES = [(16, 8, 128), (9, 3, 64), (6, 6, 48), (10, 2, 80), (16, 2, 96), (4, 2, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_gpu_paged_bits(rng, heads, kv_heads, head_dim, dtype, block_size):
    """Chunked prefill at every kind of split, decode at every kind of position, alone and mixed."""
    lengths = [2500, 1100, 64, 1, 300]
    cache = Cache(rng, lengths, heads, kv_heads, head_dim, dtype, block_size, flat=700 if block_size == 64 else 0)
    everything = list(range(len(lengths)))
    cache.compare(everything, [0] * len(lengths), lengths)
    for split in (1, 15, 63, 64, 65, 1000, 1023, 1024, 1025, 2048, 2400):
        cache.compare([0], [split], [2500])
        cache.compare([0, 4], [0, 299], [split, 300])
    for position in (0, 1, 31, 63, 64, 65, 299, 1023, 1024, 1025, 1099, 2047, 2048, 2499):
        order = [b for b in everything if lengths[b] > position]
        cache.compare(order, [position] * len(order), [position + 1] * len(order), 4096)
    cache.compare([1, 2, 0, 4], [1099, 60, 1024, 0], [1100, 64, 1300, 0])


@pytest.mark.gpu
def test_gpu_large_batches_and_groups(rng):
    """More work items than blocks, more sequences than a warp has lanes, groups of eight."""
    lengths = [int(x) for x in rng.integers(1040, 1300, 80)]
    cache = Cache(rng, lengths, 4, 2, 128, BF16, common=1040)
    order, begins = list(range(80)), [n - 1 for n in lengths]
    cache.compare(order, begins, lengths, 2048)
    for group_sizes in ([8, 0, 0, 0, 0, 0, 0, 0], [1, 7, 0, 0, 0, 0, 0, 0]):
        cache.compare(order, begins, lengths, 2048, common=[1040] * 80, group_sizes=group_sizes * 10)
    for _ in range(20):
        cache.compare(order, begins, lengths, 2048)


@pytest.mark.gpu
def test_gpu_graph_follows_its_arrays(rng):
    import cupy

    cache = Cache(rng, [1500, 40, 7, 129], 16, 8, 128, BF16)
    tables = device.asarray(cache.tables)
    q, ends = device.asarray(cache.q[:4].copy()), device.asarray(np.array([7] * 4, np.int32))
    out, cu_seqlens = cupy.empty(q.shape, q.dtype), device.asarray(bounds([1] * 4))
    sequences = PagedSequences(cu_seqlens, ends, tables, 1, 2048)

    def decode():
        paged_attention_sm90(q, cache.caches, sequences, cache.scale, out)

    decode()
    stream = cupy.cuda.Stream(non_blocking=True)
    device.synchronize()
    with stream:
        stream.begin_capture()
        decode()
        graph = stream.end_capture()
    for last in ([7, 7, 7, 7], [1500, 40, 1, 129], [1024, 33, 6, 64]):
        rows = cache.rows(range(4), [n - 1 for n in last], last)
        q[...], ends[...] = device.asarray(cache.q[rows]), device.asarray(np.array(last, np.int32))
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_same_bits(out, cache.expected[0][rows], f"contexts {last}")


def test_wrong_arguments_are_named():
    xp = device.xp()
    q, cache = xp.zeros((2, 4, 16), np.float16), xp.zeros((4, 24, 4, 16), np.float16)
    numbers = xp.zeros(2, np.int32)
    with pytest.raises(ValueError, match="block_size must be 16, 32 or a multiple of 64, got 24"):
        paged_attention_sm90(q, (cache, cache), PagedSequences(numbers, numbers, numbers, 1, 24), 1.0, q)
    cache = xp.zeros((4, 16, 4, 16), np.float16)
    with pytest.raises(ValueError, match="a group has at most 32 sequences of one query token each, got 33"):
        sequences = PagedSequences(numbers, numbers, numbers, 1, 16, SharedPrefixes(numbers, numbers, 33))
        paged_attention_sm90(q, (cache, cache), sequences, 1.0, q)
