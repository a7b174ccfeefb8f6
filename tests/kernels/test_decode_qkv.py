"""Decode from qkv in one kernel against the two that it replaces: the same bits of out, lse and the caches."""

import numpy as np
import pytest

from rlnumba.kernels.attention.paged import (
    fuses_qkv,
    paged_attention,
    paged_attention_qkv,
    plan_paged_attention,
)
from rlnumba.kernels.attention.sequences import PagedSequences, SharedPrefixes
from rlnumba.kernels.attention.sm90_decode import producer
from rlnumba.kernels.attention.sm90_decode.config import Projection, decode_config
from rlnumba.kernels.attention.sm90_decode.kernel import ARCHITECTURES, paged_attention_sm90_kernel
from rlnumba.kernels.attention.sm90_paged import paged_attention_qkv_sm90, paged_attention_sm90, plan_decode
from rlnumba.kernels.attention.split_kv import AttentionWorkspace
from rlnumba.kernels.nn.qkv import HeadNorm, Rotation, qkv_split_to_cache
from rlnumba.kernels.nn.rope import HeadShape, rope_table
from rlnumba.kernels.ptx import sm90
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.arguments import tuple_type
from rlnumba.runtime.context import current
from tests.close import assert_same_bits
from tests.kernels.test_attention_sm90 import PAGED

BF16, F16 = "bfloat16", "float16"
EPS = 1e-6


def on_device(*arrays):
    return [None if x is None else device.asarray(np.ascontiguousarray(x)) for x in arrays]


class Case:
    """A step of decode: a row of qkv for each sequence, whose caches hold all keys but those of the new tokens.

    contexts: keys of each sequence, 0: a padding row. common: tokens that the sequences of a group share; group_sizes:
    as paged_attention takes them, or None. no_slot: sequences whose new token is not stored. Everything that is not to
    be read is NaN, the new tokens' rows too.
    """

    def __init__(
        self, rng, contexts, heads, kv_heads, head_dim, dtype=BF16, block_size=16, normed=True, common=0,
        group_sizes=None, no_slot=(), segment=64,
    ):  # fmt: skip
        contexts = [int(context) for context in contexts]
        self.contexts, self.block_size, self.segment, self.scale = contexts, block_size, segment, head_dim**-0.5
        self.heads, kind, count = (dtype, heads, kv_heads, head_dim), device.dtype(dtype), len(contexts)
        self.group_sizes, self.common = group_sizes, [common if n else 0 for n in contexts]
        self.qkv = rng.standard_normal((count, (heads + 2 * kv_heads) * head_dim)).astype(kind)
        self.weights = [rng.uniform(0.5, 4, head_dim).astype(kind) if normed else None for _ in range(2)]
        self.tables = rope_table(max(contexts) + 8, head_dim, 1e4)
        # Not all positions follow from the contexts, so that neither can stand for the other.
        self.position_ids = np.array([max(n - 1, 0) + b % 3 for b, n in enumerate(contexts)], np.int32)
        width = -(-max(contexts) // block_size) + 1
        self.block_tables = rng.permutation(count * width).astype(np.int32).reshape(count, width)
        leader = 0
        for b, size in enumerate(group_sizes or ()):
            leader = b if size else leader
            self.block_tables[b, : common // block_size] = self.block_tables[leader, : common // block_size]
        shape = (self.block_tables.size, block_size, kv_heads, head_dim)
        self.caches = [np.full(shape, np.nan, kind) for _ in range(2)]
        self.slots = np.full(count, -1, np.int32)
        for b, context in enumerate(contexts):
            if context:
                positions = np.arange(context)
                rows = self.block_tables[b][positions // block_size], positions % block_size
                kept = slice(None, context if b in no_slot else context - 1)
                for cache in self.caches:
                    values = rng.standard_normal((context, kv_heads, head_dim)).astype(kind)
                    cache[tuple(x[kept] for x in rows)] = values[kept]
                if b not in no_slot:
                    self.slots[b] = rows[0][-1] * block_size + rows[1][-1]

    def projection(self):
        """(qkv, norm, rotation) on the device."""
        qkv, *weights = on_device(self.qkv, *self.weights)
        norm = None if weights[0] is None else HeadNorm(*weights, EPS)
        return qkv, norm, Rotation(*on_device(*self.tables, self.position_ids))

    def cache_arguments(self):
        """(caches, PagedSequences, scale, an output) on the device: what both forms take."""
        count, (dtype, heads, _, head_dim) = len(self.contexts), self.heads
        bounds, contexts = np.arange(count + 1, dtype=np.int32), np.array(self.contexts, np.int32)
        *caches, tables, bounds, contexts, slots = on_device(
            *(cache.copy() for cache in self.caches), self.block_tables, bounds, contexts, self.slots
        )
        out = device.xp().full((count, heads, head_dim), np.nan, device.dtype(dtype))
        groups = None
        if self.group_sizes is not None:
            declared = (np.array(numbers, np.int32) for numbers in (self.common, self.group_sizes))
            groups = SharedPrefixes(*on_device(*declared), max(4, *self.group_sizes))
        longest = max(max(self.contexts), 1)
        return caches, PagedSequences(bounds, contexts, tables, 1, longest, groups, slots), self.scale, out

    def sm90(self, fused, blocks=None, max_leading=None):
        """(out, lse, k_cache, v_cache) on the host, by one kernel or by two."""
        projection, (caches, sequences, scale, out) = self.projection(), self.cache_arguments()
        dtype, heads, kv_heads, head_dim = self.heads
        config = decode_config(
            head_dim, dtype, heads // kv_heads, min(self.block_size, 64), sequences.max_group_size
        )._replace(segment=self.segment)
        plan = plan_decode((*self.heads, self.block_size), sequences, config, blocks, max_leading)
        sequences, lse = sequences._replace(plan=plan), device.xp().zeros((heads, len(self.contexts)), np.float32)
        if fused:
            paged_attention_qkv_sm90(*projection, caches, sequences, scale, out, lse)
        else:
            q = device.xp().empty(out.shape, out.dtype)
            qkv_split_to_cache(*projection, sequences.slot_mapping, q, caches)
            paged_attention_sm90(q, caches, sequences, scale, out, lse)
        assert not device.to_host(current().own(AttentionWorkspace).counters.array).any()
        return [device.to_host(x) for x in (out, lse, *caches)]

    def compare(self, **options):
        """Both forms give the same bits, none of them NaN; returns out."""
        actual, expected = self.sm90(True, **options), self.sm90(False, **options)
        for name, x, y in zip(("out", "lse", "k_cache", "v_cache"), actual, expected, strict=True):
            assert_same_bits(x, y, name)
        assert not np.isnan(actual[0].astype(np.float32)).any()
        return actual[0]


# Around the ends of tiles and of segments of 64 keys, a padding row among them.
CONTEXTS = [1, 64, 65, 0, 130]


@pytest.mark.sim
@pytest.mark.sm90
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, dtype, block_size, normed",
    [(1, 1, 16, BF16, 16, True), (4, 2, 24, F16, 32, True), (4, 1, 16, BF16, 64, False), (7, 1, 72, F16, 16, True)],
)
def test_simulator(rng, monkeypatch, heads, kv_heads, head_dim, dtype, block_size, normed):
    """Contexts that end at the ends of tiles and of segments, and a padding row; an item for each segment."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    if head_dim > 16 or not normed:
        # One form with short segments is enough to compile.
        monkeypatch.setattr("rlnumba.runtime.launch.observers", [])
    case = Case(rng, [1, 64, 65, 0, 130], heads, kv_heads, head_dim, dtype, block_size, normed)
    case.compare(blocks=2, max_leading=1)


@pytest.mark.sim
@pytest.mark.sm90
def test_short_last_segments_in_the_simulator(rng):
    """A last segment that belongs to the item before, with the new token as its first, and one that is too long."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    Case(rng, [129, 160, 161, 128, 257, 270], 2, 1, 16, segment=128).compare(blocks=2, max_leading=1)


@pytest.mark.sim
@pytest.mark.sm90
def test_copies_that_arrive_before_the_token(rng, monkeypatch):
    """The tile of K and V holds what was in the new token's row before, NaN: not what this kernel writes there."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    if device.name() == "sim":
        # Elsewhere the simulator's copies read global memory as late as they may.
        monkeypatch.setattr(sm90, "complete_async", lambda arrive: arrive())
    Case(rng, [5, 70], 2, 1, 16).compare(blocks=1)


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.sm90
@pytest.mark.parametrize("max_leading", [2, 4])
def test_leading_spans_in_the_simulator(rng, max_leading):
    """The new token in the last tile of an item of several segments; more items than blocks."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    case = Case(rng, [193, 64, 128, 129, 2, 0, 290], 4, 2, 16)
    case.compare(blocks=3, max_leading=max_leading)


@pytest.mark.sim
@pytest.mark.sm90
def test_a_token_without_a_slot(rng):
    """Its query sees what the cache holds, which stays as it is."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    case = Case(rng, [65, 3, 64], 2, 1, 16, no_slot=(0, 2))
    before = [cache.copy() for cache in case.caches]
    case.compare(blocks=1)
    _, _, *caches = case.sm90(True)
    for actual, expected in zip(caches, before, strict=True):
        changed = np.argwhere((actual.view(np.uint16) != expected.view(np.uint16)).any((2, 3)))
        assert [16 * block + row for block, row in changed.tolist()] == [case.slots[1]]


@pytest.mark.sim
@pytest.mark.sm90
@pytest.mark.parametrize("blocks", [1, 2])
def test_groups_in_the_simulator(rng, monkeypatch, blocks):
    """The shared item's queries are those of all members; their own items hold their new tokens, and may resume."""
    if device.name() == "cpu":
        pytest.skip("needs the kernels")
    looks, counted = [], producer.load_acquire

    def looked(counters, index):
        looks.append(counted(counters, index))
        return looks[-1]

    if device.name() == "sim":
        # Which block looks when depends on the order of threads.
        monkeypatch.setattr("rlnumba.runtime.simulator.SEED", None)
        monkeypatch.setattr(producer, "load_acquire", looked)
    case = Case(rng, [10, 100, 65, 0, 81], 3, 1, 24, common=64, group_sizes=[1, 2, 0, 1, 1])
    case.common[0] = case.common[4] = 0
    case.compare(blocks=blocks)
    if device.name() == "sim":
        # The second half is of the two kernels. One block looks for the first member's item too early.
        assert (1 in looks[: len(looks) // 2]) == (blocks == 1)


@pytest.mark.parametrize("normed", [True, False])
def test_the_operator_is_its_two_parts(rng, normed):
    """On the cpu device, and on GPUs in every family."""
    if device.name() == "sim":
        pytest.skip("too large for the simulator")
    head_dim, dtype = (128, BF16) if device.name() == "cuda" else (48, "float32")
    case = Case(rng, [1, 30, 64, 0, 200], 4, 2, head_dim, dtype, normed=normed)
    for family in ("sm90", "sm80", "simt") if dispatch.architecture() == (9, 0) else ("auto",):
        with dispatch.forced(family):
            results = [operator_results(case, fused) for fused in (True, False)]
        for actual, expected in zip(*results, strict=True):
            assert_same_bits(actual, expected, family)


def operator_results(case, fused):
    """(out, k_cache, v_cache) on the host of the operator or of its two parts."""
    projection, (caches, sequences, scale, out) = case.projection(), case.cache_arguments()
    if fused:
        paged_attention_qkv(*projection, caches, sequences, scale, out)
    else:
        q = device.xp().empty(out.shape, out.dtype)
        qkv_split_to_cache(*projection, sequences.slot_mapping, q, caches)
        paged_attention(q, caches, sequences, scale, out)
    return [device.to_host(x) for x in (out, *caches)]


@pytest.mark.sim
@pytest.mark.sm90
def test_the_family_decides(rng, monkeypatch):
    if device.name() != "sim":
        pytest.skip("forces a family")
    launched = []
    monkeypatch.setattr("rlnumba.runtime.launch.observers", [lambda kernel, _: launched.append(kernel.__name__)])
    case = Case(rng, [5, 0, 17], 2, 1, 16)
    results = []
    for family in ("sm90", "simt"):
        with dispatch.forced(f"attention={family}"):
            assert fuses_qkv(*case.heads) == (family == "sm90")
            results.append(operator_results(case, True))
    assert launched == [
        "list_work_items_kernel", "paged_attention_sm90_kernel", "qkv_split_kernel", "attention_kernel",
    ]  # fmt: skip
    for actual, expected in zip(results[0][1:], results[1][1:], strict=True):
        assert_same_bits(actual, expected, "caches")


def test_wrong_arguments_are_named(rng):
    case = Case(rng, [5, 4], 2, 1, 16, "float32")
    qkv, norm, rotation = case.projection()
    caches, sequences, scale, out = case.cache_arguments()

    def call(qkv=qkv, **wrong):
        paged_attention_qkv(qkv, norm, rotation, caches, sequences._replace(**wrong), scale, out)

    with pytest.raises(ValueError, match=r"paged_attention_qkv: slot_mapping must be \(2\) int32, got \(1,\) int32"):
        call(slot_mapping=sequences.slot_mapping[:1])
    with pytest.raises(ValueError, match=r"paged_attention_qkv: qkv must be \(2, 64\) float32, got \(2, 63\) float32"):
        call(device.asarray(device.to_host(qkv)[:, 1:].copy()))
    with pytest.raises(ValueError, match="paged_attention_qkv: max_context_len must be at most 2 blocks"):
        call(max_context_len=33)
    with pytest.raises(ValueError, match="paged_attention_qkv: max_seqlen_q must be 1, got 2"):
        call(max_seqlen_q=2)


def argument_types(dtype, half, normed):
    """Types of paged_attention_sm90_kernel's arguments with fused_qkv."""
    heads, table, numbers = f"{'uint16' if dtype == BF16 else dtype}[:,::1]", "float32[:,::1]", "int32[::1]"
    weight = heads if normed else table
    types = heads, weight, weight, "float32", table, table, numbers, numbers, heads, heads
    return [tuple_type(Projection, *types), *PAGED]


@pytest.mark.parametrize(
    "head_dim, gqa_ratio, group_size, dtype, normed",
    [(128, 2, 1, BF16, True), (128, 2, 16, BF16, True), (64, 7, 1, F16, False), (256, 8, 1, BF16, True)],
)
def test_kernels_compile_for_gpus(compile_offline, head_dim, gqa_ratio, group_size, dtype, normed):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config = decode_config(head_dim, dtype, gqa_ratio, 16, group_size)._replace(fused_qkv=True)
    assert config.layout.nbytes * config.blocks <= 227 * 1024
    kernel = paged_attention_sm90_kernel(config, HeadShape(head_dim, 8, 8, 4), normed)
    troubles = compile_offline(kernel, argument_types(dtype, head_dim // 2, normed), ARCHITECTURES[0])
    assert not troubles, "\n".join(troubles)


# heads, kv_heads, head_dim, dtype: Qwen3-0.6B, SmolLM2-135M, Qwen2.5-0.5B, Llama-3.1-8B, one group of 16, odd widths.
SHAPES = [
    (16, 8, 128, BF16), (9, 3, 64, BF16), (14, 2, 64, F16), (32, 8, 128, BF16), (16, 1, 128, F16), (6, 2, 80, BF16),
    (4, 2, 24, BF16), (4, 2, 256, BF16),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("heads, kv_heads, head_dim, dtype", SHAPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("normed", [True, False])
def test_gpu(rng, heads, kv_heads, head_dim, dtype, block_size, normed):
    """Contexts around the ends of tiles and of segments of 1,024 keys, padding rows, a token without a slot."""
    contexts = [1, 63, 64, 65, 0, 127, 128, 700, 1023, 1024, 1025, 2100, 0, 500]
    case = Case(rng, contexts, heads, kv_heads, head_dim, dtype, block_size, normed, no_slot=(3, 9), segment=1024)
    for max_leading in (None, 1, 2):
        case.compare(max_leading=max_leading)
    case.compare(blocks=3)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("sequences, context", [(1, 100), (1, 2000), (8, 128), (64, 100), (64, 400), (256, 512)])
def test_gpu_batches(rng, sequences, context):
    """The engine's sizes: a block has one item, or many. Repeated, because a data race shows rarely."""
    case = Case(rng, list(rng.integers(max(context - 70, 1), context + 1, sequences)), 16, 8, 128, segment=1024)
    expected = case.sm90(False)
    for _ in range(10):
        for actual, wanted in zip(case.sm90(True), expected, strict=True):
            assert_same_bits(actual, wanted)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("group_size, heads, kv_heads, head_dim", [(2, 16, 8, 128), (4, 9, 3, 64), (16, 16, 8, 128)])
@pytest.mark.parametrize("common", [1024, 2064])
def test_gpu_groups(rng, group_size, heads, kv_heads, head_dim, common):
    contexts = list(common + rng.integers(1, 400, 64))
    sizes = [group_size if b % group_size == 0 else 0 for b in range(len(contexts))]
    case = Case(rng, contexts, heads, kv_heads, head_dim, common=common, group_sizes=sizes, segment=1024)
    expected = case.sm90(False)
    for blocks in (None, None, 5):
        for actual, wanted in zip(case.sm90(True, blocks=blocks), expected, strict=True):
            assert_same_bits(actual, wanted)


@pytest.mark.gpu
@pytest.mark.sm90
def test_gpu_graph_of_layers(rng):
    """Layers in a graph with PDL, each after a kernel that writes qkv: no layer reads it, or draws items, too early."""
    import cupy

    from rlnumba.kernels.gemm.ops import linear
    from rlnumba.kernels.tile.tensor_map import keep_tensor_maps
    from rlnumba.runtime.launch import pdl_scope

    sequences, layers, (heads, kv_heads, head_dim) = 64, 6, (16, 8, 128)
    cases = [Case(rng, [400 - b for b in range(sequences)], heads, kv_heads, head_dim) for _ in range(layers)]
    hidden, columns = 1024, (heads + 2 * kv_heads) * head_dim
    x = device.asarray(rng.standard_normal((sequences, hidden)).astype(device.dtype(BF16)))
    matrices = [
        device.asarray((rng.standard_normal((columns, hidden)) / 32).astype(device.dtype(BF16))) for _ in range(layers)
    ]
    # One array for all layers, so that a layer that reads early gets the last one's.
    qkv = cupy.zeros((sequences, columns), x.dtype)
    arguments = [(*case.projection()[1:], *case.cache_arguments()) for case in cases]
    fresh = [[cache.copy() for cache in caches] for _, _, caches, *_ in arguments]

    def run(fused):
        # All layers have the same contexts.
        plan = plan_paged_attention(*cases[0].heads, 16, arguments[0][3])
        for matrix, (norm, rotation, caches, sequences, scale, out) in zip(matrices, arguments, strict=True):
            linear(x, matrix, qkv)
            planned = sequences._replace(plan=plan)
            if fused:
                paged_attention_qkv(qkv, norm, rotation, caches, planned, scale, out)
            else:
                q = cupy.empty(out.shape, out.dtype)
                qkv_split_to_cache(qkv, norm, rotation, sequences.slot_mapping, q, caches)
                paged_attention(q, caches, planned, scale, out)

    def reset():
        for (_, _, caches, _, _, out), before in zip(arguments, fresh, strict=True):
            out.fill(0)
            for cache, array in zip(caches, before, strict=True):
                cache[...] = array
        qkv.fill(0)

    def results():
        device.synchronize()
        return [device.to_host(array) for _, _, caches, _, _, out in arguments for array in (out, *caches)]

    run(False)
    expected = results()
    stream = cupy.cuda.Stream(non_blocking=True)
    reset()
    run(True)
    device.synchronize()
    with stream, keep_tensor_maps(), pdl_scope():
        stream.begin_capture()
        run(True)
        graph = stream.end_capture()
    for _ in range(20):
        reset()
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        for actual, wanted in zip(results(), expected, strict=True):
            assert_same_bits(actual, wanted)
