"""The gradient of causal packed attention on Hopper's tensor cores, in one pass over the scores, without float atomics.

Formulas and shapes as in kernels/attention/backward.py; inputs float16 or bfloat16, accumulators float32.

Design. A block owns 128 keys of a key head and passes over the queries that see them, from the last to the first,
head by head of the group:

    S^T = K Q^T    dP^T = V dO^T    P = exp2(S - lse)    dS = P (dP - delta)
    dV += P^T dO   dK += dS^T Q     dq of the queries += dS K

Two consumer warpgroups own 64 keys each, with the rows of dK and dV in registers; S^T and dP^T come out of the tensor
cores in just the layout in which P^T and dS^T go into the products for dV and dK as left operands, so these never leave
the registers. dS goes through shared memory once, because dq sums over the keys of both warpgroups. That leaves dq,
whose sum runs over blocks. Weighed for 2 x 16384 tokens, 16 and 8 heads of 128 (5.5 TFLOP by the usual count of five
products; an H200 does 750 TFLOP/s):

    dq in a kernel of its own       7 products instead of 5, twice the exponentials; measured 446, in turns 538
    partial dq of each block        17 GB of them, and 4 GB at 4 x 4096
    dq added by atomics             5 products; the order of the sum is chance
    dq added in turns (taken)       5 products; the same 17 GB are added to 0.27 GB of float32 sums, mostly in the
                                    second-level cache: 1.2 TB/s at 390 TFLOP/s

In turns: blocks add to the float32 sums of a query tile in ascending order of their keys, and a counter for each
(query tile, head) says whose turn it is. The first block stores instead of adding, so nothing is cleared before. Two
warps do nothing but wait for turns and start the additions, in runs of 32 KB by the copy engine, so the products go on:
a block that must wait delays its consumers only when it is more than a step late. Who is waited for runs already, on
any grid, because blocks take tickets, and a block's ticket is later than those of the keys before its own.

The order of the tickets decides the speed. A step of 64 queries x 128 keys brings 32 KB of q and dout and reads and
writes 32 KB of sums, in some 2.2 us: on 132 SMs 5.9 TB/s, more than the memory gives. Blocks of one chain (a key head
of a sequence) that run at the same time share these bytes in the second-level cache, if they are at the same queries;
they are, since all begin with the last. But the n-th of them adds n hand-overs later, a microsecond or so each. So
tickets go through 32 chains, one key tile of each after the other, then to the next 32: four blocks of each chain run
together, and the first keys, whose blocks take the most steps, come first; the last to run are short.

Work of a step at 128 columns: 5 x 512 cycles of the tensor cores; 512 of the exponential unit and 900 instructions a
scheduler beside them; shared memory moves 370 KB, 2,900 cycles at 128 bytes, which is the bound: 88 % of the peak.
Registers of a consumer thread: 128 for dK and dV, 32 for scores, 32 for dP^T and then dq, 32 for P and dS in 16 bits.

Heads of more than 128 columns: a block owns 64 keys, and a consumer half the columns of their dK and dV. Each computes
the scores of half the queries; P and dS go to the other through shared memory. dq is added in two parts.

Queries beyond the end of a sequence have lse = infinity, hence P = dS = 0; what their rows of q and dout hold (the
next sequence) is multiplied by zero. Keys beyond the end see no query. Rows of dk and dv beyond it are not written.

Three launches: rows (delta, lse and cleared counters, padded to whole query tiles), the products, and dq to its dtype.
Sources: Dao 2023 (FlashAttention-2), algorithm 2; Shah et al. 2024 (FlashAttention-3), section 3.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.sm90 import (
    BOX_BYTES,
    LINE,
    Address,
    bulk_commit_group,
    bulk_wait_group,
    bulk_wait_group_read,
    cvt_pack,
    cvt_unpack,
    fence_proxy_async,
    load_pair,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    named_barrier_sync,
    shared_address,
    smem_descriptor,
    stmatrix_x4,
    store_four,
    tensor_map,
    tensor_map_address,
    tma_load_3d,
    warp_uniform,
)
from rlnumba.kernels.ptx.sm90_async import (
    bulk_copy_load,
    bulk_copy_store,
    bulk_reduce_add,
    semaphore_release,
    semaphore_wait,
    setmaxnreg,
    wgmma_async,
    wgmma_wait_group,
)
from rlnumba.kernels.ptx.warp import device_function, exp2, vector_access, warp_sum
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, i64, f32 = np.int32, np.int64, np.float32

ARCHITECTURES = [(9, 0, "a")]

WARPGROUP = 128
# Queries of a step; bytes of a box of them, of their lse or delta, and of what they exchange with the block's keys.
QUERIES = 64
QUERY_BOX = QUERIES * LINE
ROW_BYTES = 4 * QUERIES
SCORE_BYTES = 2 * QUERIES * 128
# Of a thread that brings tiles or gives dq away, and of a consumer; together, with 128 and 256 threads, an SM's.
FEW_REGISTERS, MANY_REGISTERS = 56, 224
LOG2_E = f32(math.log2(math.e))
MINUS_INFINITY = f32(-math.inf)
# Rows whose loads a warp of attention_rows_kernel has under way at once.
ROWS_AT_ONCE = 4


class Tile(NamedTuple):
    """How the kernels of this module work.

    element: "float16" or "bfloat16". ahead: the scores of the next step are begun before dq of this one is taken
    (heads up to 128). chains: how many key heads of sequences are worked on at the same time; on 132 SMs, 32 of them
    means four blocks of each.
    """

    head_dim: int
    element: str
    ahead: bool = True
    chains: int = 32

    @property
    def wide(self):
        """Whether the consumers share the keys, half of the columns each: their registers hold no more."""
        return self.head_dim > 128

    @property
    def keys(self):
        """Keys of a block."""
        return 64 if self.wide else 128

    @property
    def columns(self):
        """Columns that the tensor cores multiply; zeros beyond head_dim."""
        return -(-self.head_dim // 16) * 16

    @property
    def boxes(self):
        """Swizzled boxes of 64 columns that a row takes."""
        return 4 if self.wide else -(-self.columns // 64)

    @property
    def q_stages(self):
        """Tiles of q on their way."""
        return 2 if self.wide else 4 // self.boxes

    @property
    def dout_stages(self):
        """Tiles of dout on their way."""
        return 1 if self.wide else self.q_stages

    @property
    def dq_parts(self):
        """In how many parts a step's dq is added; a part is two boxes of columns, or one."""
        return 2 if self.wide else 1

    @property
    def dq_columns(self):
        """Columns of a part that a consumer multiplies: one of two boxes, or half of the only one."""
        return 64 if self.boxes > 1 else self.columns // 2

    @property
    def run(self):
        """Elements of a part of dq: the first consumer's, then the second's."""
        return 2 * QUERIES * self.dq_columns

    @property
    def shared_bytes(self):
        return layout(self).end + 1024


class Layout(NamedTuple):
    """Where things lie in shared memory: bytes from the first multiple of 1024 on.

    k, v [box | key]; for each stage q, dout [box | query]; two buffers of ds [key], or of [P | dS]; a part of dq;
    for each stage lse and delta of its rows; barriers of 8 bytes: for each stage, and two for dq_full.
    """

    k: int
    v: int
    q: int
    dout: int
    ds: int
    dq: int
    lse: int
    delta: int
    k_full: int
    v_full: int
    q_full: int
    q_empty: int
    dout_full: int
    dout_empty: int
    dq_full: int
    dq_empty: int
    end: int


@functools.cache
def layout(tile):
    """The Layout of a Tile."""
    keys, queries = tile.boxes * tile.keys * LINE, tile.boxes * QUERY_BOX
    q_stages, dout_stages = tile.q_stages, tile.dout_stages
    sizes = [keys, keys, q_stages * queries, dout_stages * queries]
    sizes += [2 * SCORE_BYTES, 4 * tile.run, q_stages * ROW_BYTES, dout_stages * ROW_BYTES, 8, 8]
    sizes += [8 * q_stages, 8 * q_stages, 8 * dout_stages, 8 * dout_stages, 16, 8]
    return Layout(*(sum(sizes[:i]) for i in range(len(sizes) + 1)))


def supports(head_dim):
    """Whether the kernels of this module take heads of this size."""
    return head_dim % 8 == 0 and 0 < head_dim <= 256


@specialize
def attention_rows_kernel(tile):
    """The kernel of a Tile that prepares what belongs to a query row."""
    head_dim, element, dq_parts = tile.head_dim, tile.element, tile.dq_parts
    words = head_dim // 2
    parts = -(-words // 32)
    loads = ROWS_AT_ONCE * parts
    unpack_two = cvt_unpack(element)

    @cuda.jit
    def attention_rows_kernel(dout, out, lse, cu_seqlens, rows, counters, tickets):
        """rows[t, h] = (lse, delta) of the rows of query tile t and head h; lse times log2(e), infinity beyond the end.

        dout, out (N, H, E / 2): pairs of elements. A block owns a tile of a head and clears its counters; a warp
        owns ROWS_AT_ONCE rows at a time, a lane every 32nd pair, added by a butterfly.
        """
        heads = out.shape[1]
        sequence, head = cuda.blockIdx.z, cuda.blockIdx.y
        start, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        first = start + i32(cuda.blockIdx.x) * i32(QUERIES)
        place = i64(start // QUERIES + sequence + cuda.blockIdx.x) * heads + head
        thread = cuda.threadIdx.x
        if thread == 0 and head == 0 and sequence == 0 and cuda.blockIdx.x == 0:
            tickets[0] = 0
        if first >= end:
            return
        if thread < dq_parts:
            counters[place * dq_parts + thread] = 0
        lane = thread % 32
        sums = cuda.local.array(ROWS_AT_ONCE, np.float32)
        left = cuda.local.array(loads, np.int32)
        right = cuda.local.array(loads, np.int32)
        for r in range(thread // 32 * ROWS_AT_ONCE, QUERIES, 4 * ROWS_AT_ONCE):
            for i in range(ROWS_AT_ONCE):
                token = min(first + r + i, end - 1)
                for part in range(parts):
                    word = min(lane + part * 32, words - 1)
                    left[i * parts + part] = dout[token, head, word]
                    right[i * parts + part] = out[token, head, word]
            for i in range(ROWS_AT_ONCE):
                sums[i] = f32(0.0)
                for part in range(parts):
                    if lane + part * 32 < words:
                        low, high = unpack_two(left[i * parts + part])
                        other_low, other_high = unpack_two(right[i * parts + part])
                        sums[i] += low * other_low + high * other_high
            for i in range(ROWS_AT_ONCE):
                total = warp_sum(sums[i])
                if lane == i:
                    alive = first + r + i < end
                    row_lse = lse[head, min(first + r + i, end - 1)] * LOG2_E
                    rows[place * 2 * QUERIES + r + i] = row_lse if alive else f32(math.inf)
                    rows[(place * 2 + 1) * QUERIES + r + i] = total if alive else f32(0.0)

    return attention_rows_kernel


@functools.cache
def bring_function(tile):
    """The device function of the thread that asks for tiles."""
    boxes, q_stages, dout_stages = tile.boxes, tile.q_stages, tile.dout_stages
    key_box = tile.keys * LINE
    key_bytes, query_bytes = boxes * key_box, boxes * QUERY_BOX
    places = layout(tile)
    at_k, at_v, at_q, at_dout, at_lse, at_delta = places.k, places.v, places.q, places.dout, places.lse, places.delta
    k_full, v_full, q_full, q_empty = places.k_full, places.v_full, places.q_full, places.q_empty
    dout_full, dout_empty = places.dout_full, places.dout_empty

    @device_function
    def bring(base, q, k, v, dout, rows, kv_head, group, heads, first_row, query_tiles, place):
        """K and V from first_row on; then q, dout and their rows of `query_tiles` tiles from the last to the first.

        place: of the last tile and the group's first head in `rows`.
        """
        mbarrier_expect_tx(base + k_full, key_bytes)
        for box in range(boxes):
            tma_load_3d(base + at_k + box * key_box, k, box * 64, kv_head, first_row, base + k_full)
        mbarrier_expect_tx(base + v_full, key_bytes)
        for box in range(boxes):
            tma_load_3d(base + at_v + box * key_box, v, box * 64, kv_head, first_row, base + v_full)
        stage, parity, head = i32(0), i32(1), i32(0)
        row = first_row + (query_tiles - i32(1)) * i32(QUERIES)
        for step in range(query_tiles * group):
            q_head, at = kv_head * group + head, (place + head) * (2 * QUERIES)
            # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
            mbarrier_wait(base + q_empty + stage * 8, parity)
            arrived = base + q_full + stage * 8
            mbarrier_expect_tx(arrived, query_bytes + ROW_BYTES)
            for box in range(boxes):
                target = base + at_q + stage * query_bytes + box * QUERY_BOX
                tma_load_3d(target, q, box * 64, q_head, row, arrived)
            bulk_copy_load(base + at_lse + stage * ROW_BYTES, rows, at, QUERIES, arrived)
            dout_stage, dout_parity = stage, parity
            if dout_stages == 1:
                dout_stage, dout_parity = i32(0), i32(step & 1) ^ i32(1)
            mbarrier_wait(base + dout_empty + dout_stage * 8, dout_parity)
            arrived = base + dout_full + dout_stage * 8
            mbarrier_expect_tx(arrived, query_bytes + ROW_BYTES)
            for box in range(boxes):
                target = base + at_dout + dout_stage * query_bytes + box * QUERY_BOX
                tma_load_3d(target, dout, box * 64, q_head, row, arrived)
            bulk_copy_load(base + at_delta + dout_stage * ROW_BYTES, rows, at + QUERIES, QUERIES, arrived)
            stage += i32(1)
            if stage == q_stages:
                stage = i32(0)
                parity ^= i32(1)
            head += i32(1)
            if head == group:
                head = i32(0)
                row -= i32(QUERIES)
                place -= heads

    return bring


@functools.cache
def give_function(tile):
    """The device function of the two threads that give dq away."""
    parts, run = tile.dq_parts, tile.run
    places = layout(tile)
    at_dq, dq_full, dq_empty = places.dq, places.dq_full, places.dq_empty

    @device_function
    def give(base, own, dq_sums, counters, group, heads, key_tile, query_tiles, place):
        """Add every second part of dq to its sums, from part `own` (0, 1) on, when the blocks before have.

        While one thread still waits for its part to be written, the other may wait for its turn. place: of the last
        tile and the group's first head.
        """
        head, parity = i32(0), i32(0)
        for given in range(query_tiles * group * parts):
            if given & 1 == own:
                index = (place + head) * parts + (given & (parts - 1))
                if key_tile > 0:
                    semaphore_wait(counters, index, key_tile)
                mbarrier_wait(base + dq_full + own * 8, parity)
                parity ^= i32(1)
                if key_tile > 0:
                    bulk_reduce_add(dq_sums, i64(index) * run, run, base + at_dq)
                else:
                    bulk_copy_store(dq_sums, i64(index) * run, run, base + at_dq)
                bulk_commit_group()
                bulk_wait_group_read()
                mbarrier_arrive(base + dq_empty)
                bulk_wait_group()
                semaphore_release(counters, index, key_tile + 1)
            if given & (parts - 1) == parts - 1:
                head += i32(1)
                if head == group:
                    head = i32(0)
                    place -= heads

    return give


@functools.cache
def probabilities_functions(columns, element):
    """(probabilities, gradients) of 64 keys and `columns` queries, as a warpgroup's threads hold S^T and dP^T.

    A thread holds keys `key` and key + 8, queries 8 b + pair and the next.
    """
    pack_two = cvt_pack(element)

    @device_function
    def probabilities(scores, first, masks, lse, scale_log2, words):
        """P in place of S, and rounded in `words`. lse: where the rows of `pair` begin. If `masks`, a key is not seen
        by queries before its own position; first: the position of `pair` less that of `key`."""
        if masks:
            for block in range(columns // 8):
                for i in range(4):
                    if first < i32((i >> 1) * 8 - (i & 1) - block * 8):
                        scores[block * 4 + i] = MINUS_INFINITY
        for block in range(columns // 8):
            low, high = load_pair(lse + block * 32)
            i = block * 4
            scores[i] = exp2(scores[i] * scale_log2 - low)
            scores[i + 1] = exp2(scores[i + 1] * scale_log2 - high)
            scores[i + 2] = exp2(scores[i + 2] * scale_log2 - low)
            scores[i + 3] = exp2(scores[i + 3] * scale_log2 - high)
        for i in range(columns // 4):
            words[i] = pack_two(scores[2 * i], scores[2 * i + 1])

    @device_function
    def gradients(scores, products, delta, words):
        """dS, rounded, from P and dP. delta: where the rows of `pair` begin."""
        for block in range(columns // 8):
            low, high = load_pair(delta + block * 32)
            i = block * 4
            words[i // 2] = pack_two(scores[i] * (products[i] - low), scores[i + 1] * (products[i + 1] - high))
            words[i // 2 + 1] = pack_two(
                scores[i + 2] * (products[i + 2] - low), scores[i + 3] * (products[i + 3] - high)
            )

    return probabilities, gradients


@functools.cache
def store_scores_function(columns):
    """The device function that writes a warpgroup's 64 x columns words to lines of 64 queries."""

    @device_function
    def store_scores(place, first_chunk, line, lane, words):
        """place: of line 0; a warp writes 16 lines, a lane helps with line `line`, chunks first_chunk ..."""
        for block in range(columns // 16):
            chunk = first_chunk + block * 2 + (lane >> i32(4))
            stmatrix_x4(
                place + line * LINE + ((chunk ^ (line & i32(7))) << i32(4)),
                words[4 * block],
                words[4 * block + 1],
                words[4 * block + 2],
                words[4 * block + 3],
            )

    return store_scores


@functools.cache
def store_keys_function(tile, columns):
    """The device function that writes a thread's rows of dk or dv."""
    words_of_row = tile.head_dim // 2
    pack_two = cvt_pack(tile.element)

    @device_function
    def store_keys(acc, scale, out, token, alive, kv_head, first_word):
        """Rows token and token + 8 of out (N, HK, E / 2), where they are among the first `alive`; times scale."""
        for half in range(2):
            if half * 8 < alive:
                for block in range(columns // 8):
                    i = block * 4 + half * 2
                    word = first_word + block * 4
                    if word < words_of_row:
                        out[token + half * 8, kv_head, word] = pack_two(acc[i] * scale, acc[i + 1] * scale)

    return store_keys


@functools.cache
def consume_function(tile):
    """The device function of a consumer that owns 64 keys of the block; heads up to 128."""
    element, ahead, columns, stages = tile.element, tile.ahead, tile.columns, tile.q_stages
    key_box, query_bytes = tile.keys * LINE, tile.boxes * QUERY_BOX
    # From the columns of K that the first consumer takes for dq to those of the second.
    dq_offset = key_box if tile.boxes > 1 else columns
    accumulators, score_count, dq_accumulators = columns // 2, QUERIES // 2, tile.dq_columns // 2
    word_count = score_count // 2
    dq_bytes = 2 * tile.run
    places = layout(tile)
    at_k, at_v, at_q, at_dout, at_ds, at_dq = places.k, places.v, places.q, places.dout, places.ds, places.dq
    at_lse, at_delta, k_full, v_full = places.lse, places.delta, places.k_full, places.v_full
    q_full, q_empty, dout_full, dout_empty = places.q_full, places.q_empty, places.dout_full, places.dout_empty
    dq_full, dq_empty = places.dq_full, places.dq_empty
    # S^T = K Q^T and dP^T = V dO^T, dV += P^T dO and dK += dS^T Q, dq += dS K.
    start_scores = wgmma_async(QUERIES, element, columns // 16, "k", "k", False, key_box, QUERY_BOX)
    start_keys = wgmma_async(columns, element, QUERIES // 16, "registers", "mn", True)
    start_dq = wgmma_async(tile.dq_columns, element, tile.keys // 16, "mn", "mn", False)
    wait_scores_1, wait_scores = wgmma_wait_group(score_count, 1), wgmma_wait_group(score_count, 0)
    # The products for dq follow those for dk.
    wait_dv, wait_dk = wgmma_wait_group(accumulators, 2), wgmma_wait_group(accumulators, 1)
    wait_dq = wgmma_wait_group(dq_accumulators, 1 if ahead else 0)
    probabilities, gradients = probabilities_functions(QUERIES, element)
    store_scores, store_keys = store_scores_function(QUERIES), store_keys_function(tile, columns)

    @device_function
    def consume(base, consumer, thread, group, steps, scale, kv_head, first_row, alive, dk, dv):
        """alive: keys of the block that lie in the sequence."""
        lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
        own_keys = smem_descriptor(base + at_k + consumer * BOX_BYTES)
        own_values = smem_descriptor(base + at_v + consumer * BOX_BYTES)
        dq_keys = smem_descriptor(base + at_k + consumer * dq_offset)
        own_ds = base + at_ds + consumer * BOX_BYTES
        own_dq = base + at_dq + consumer * dq_bytes + (thread & i32(127)) * 16
        key = consumer * i32(64) + warp * i32(16) + (lane >> i32(2))
        pair = (lane & i32(3)) * i32(2)
        line = warp * i32(16) + (lane & i32(15))
        scores = cuda.local.array(score_count, np.float32)
        products = cuda.local.array(score_count, np.float32)
        p_words = cuda.local.array(word_count, np.int32)
        ds_words = cuda.local.array(word_count, np.int32)
        dk_acc = cuda.local.array(accumulators, np.float32)
        dv_acc = cuda.local.array(accumulators, np.float32)
        dq_acc = cuda.local.array(dq_accumulators, np.float32)
        for i in range(accumulators):
            dk_acc[i] = f32(0.0)
            dv_acc[i] = f32(0.0)
        scale_log2 = scale * LOG2_E
        stage, parity, buffer, dq_parity = i32(0), i32(0), i32(0), i32(1)
        mbarrier_wait(base + k_full, 0)
        if ahead:
            mbarrier_wait(base + q_full, 0)
            start_scores(scores, own_keys, smem_descriptor(base + at_q))
            wait_scores(scores)
        mbarrier_wait(base + v_full, 0)
        for step in range(steps):
            q_tile = smem_descriptor(base + at_q + stage * query_bytes)
            dout_tile = smem_descriptor(base + at_dout + stage * query_bytes)
            if not ahead:
                mbarrier_wait(base + q_full + stage * 8, parity)
                start_scores(scores, own_keys, q_tile)
            mbarrier_wait(base + dout_full + stage * 8, parity)
            start_scores(products, own_values, dout_tile)
            if not ahead:
                wait_scores_1(scores)
            # The last two query tiles have the positions of the keys.
            left = steps - step
            first = i32(pair - key + (QUERIES if left > group else 0))
            row_place = base + stage * ROW_BYTES + pair * 4
            probabilities(scores, first, left <= 2 * group, row_place + at_lse, scale_log2, p_words)
            wait_scores(products)
            start_keys(dv_acc, p_words, dout_tile)
            gradients(scores, products, row_place + at_delta, ds_words)
            store_scores(own_ds + buffer, i32(0), line, lane, ds_words)
            start_keys(dk_acc, ds_words, q_tile)
            fence_proxy_async()
            # dS of both is there; and since none comes here before its last dq is done, the other buffer is free.
            named_barrier_sync(1, 2 * WARPGROUP)
            start_dq(dq_acc, smem_descriptor(base + at_ds + buffer), dq_keys)
            buffer ^= i32(SCORE_BYTES)
            wait_dv(dv_acc)
            mbarrier_arrive(base + dout_empty + stage * 8)
            wait_dk(dk_acc)
            mbarrier_arrive(base + q_empty + stage * 8)
            stage += i32(1)
            if stage == stages:
                stage = i32(0)
                parity ^= i32(1)
            if ahead:
                # After the last step this multiplies an old tile, for nothing.
                if step + 1 < steps:
                    mbarrier_wait(base + q_full + stage * 8, parity)
                start_scores(scores, own_keys, smem_descriptor(base + at_q + stage * query_bytes))
            wait_dq(dq_acc)
            mbarrier_wait(base + dq_empty, dq_parity)
            dq_parity ^= i32(1)
            for i in range(dq_accumulators // 4):
                store_four(own_dq + i * 2048, dq_acc[4 * i], dq_acc[4 * i + 1], dq_acc[4 * i + 2], dq_acc[4 * i + 3])
            fence_proxy_async()
            mbarrier_arrive(base + dq_full + (step & 1) * 8)
            if ahead:
                # Products in flight from one turn of the loop to the next make ptxas wait for each of them.
                wait_scores(scores)
        word = lane & i32(3)
        store_keys(dk_acc, scale, dk, first_row + key, alive - key, kv_head, word)
        store_keys(dv_acc, f32(1.0), dv, first_row + key, alive - key, kv_head, word)

    return consume


@functools.cache
def consume_wide_function(tile):
    """The device function of a consumer that owns half the columns of the block's 64 keys; heads up to 256.

    Of S^T and dP^T it computes the scores of half the queries; P and dS go to the other through shared memory.
    """
    element, columns, q_stages = tile.element, tile.columns, tile.q_stages
    half_queries, half_boxes, half_columns = QUERIES // 2, tile.boxes // 2, 128
    key_box, query_bytes = tile.keys * LINE, tile.boxes * QUERY_BOX
    accumulators, score_count, dq_accumulators = half_columns // 2, half_queries // 2, tile.dq_columns // 2
    word_count = score_count // 2
    dq_bytes = 2 * tile.run
    places = layout(tile)
    at_k, at_v, at_q, at_dout, at_p, at_dq = places.k, places.v, places.q, places.dout, places.ds, places.dq
    at_ds = at_p + BOX_BYTES
    at_lse, at_delta, k_full, v_full = places.lse, places.delta, places.k_full, places.v_full
    q_full, q_empty, dout_full, dout_empty = places.q_full, places.q_empty, places.dout_full, places.dout_empty
    dq_full, dq_empty = places.dq_full, places.dq_empty
    start_scores = wgmma_async(half_queries, element, columns // 16, "k", "k", False, key_box, QUERY_BOX)
    start_keys = wgmma_async(half_columns, element, QUERIES // 16, "k", "mn", True)
    start_dq = wgmma_async(tile.dq_columns, element, tile.keys // 16, "mn", "mn", False)
    wait_scores_1, wait_scores = wgmma_wait_group(score_count, 1), wgmma_wait_group(score_count, 0)
    wait_keys_2, wait_keys_1 = wgmma_wait_group(accumulators, 2), wgmma_wait_group(accumulators, 1)
    wait_dq = wgmma_wait_group(dq_accumulators, 0)
    probabilities, gradients = probabilities_functions(half_queries, element)
    store_scores, store_keys = store_scores_function(half_queries), store_keys_function(tile, half_columns)

    @device_function
    def consume(base, consumer, thread, group, steps, scale, kv_head, first_row, alive, dk, dv):
        """alive: keys of the block that lie in the sequence."""
        lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
        keys, values = smem_descriptor(base + at_k), smem_descriptor(base + at_v)
        own_dq = base + at_dq + consumer * dq_bytes + (thread & i32(127)) * 16
        key = warp * i32(16) + (lane >> i32(2))
        pair = (lane & i32(3)) * i32(2) + consumer * i32(half_queries)
        line = warp * i32(16) + (lane & i32(15))
        scores = cuda.local.array(score_count, np.float32)
        products = cuda.local.array(score_count, np.float32)
        words = cuda.local.array(word_count, np.int32)
        dk_acc = cuda.local.array(accumulators, np.float32)
        dv_acc = cuda.local.array(accumulators, np.float32)
        dq_acc = cuda.local.array(dq_accumulators, np.float32)
        for i in range(accumulators):
            dk_acc[i] = f32(0.0)
            dv_acc[i] = f32(0.0)
        scale_log2 = scale * LOG2_E
        stage, parity, buffer, dq_parity = i32(0), i32(0), i32(0), i32(1)
        mbarrier_wait(base + k_full, 0)
        mbarrier_wait(base + v_full, 0)
        for step in range(steps):
            q_tile = base + at_q + stage * query_bytes
            mbarrier_wait(base + q_full + stage * 8, parity)
            start_scores(scores, keys, smem_descriptor(q_tile + consumer * (half_queries * LINE)))
            mbarrier_wait(base + dout_full, i32(step & 1))
            start_scores(products, values, smem_descriptor(base + at_dout + consumer * (half_queries * LINE)))
            wait_scores_1(scores)
            # The last query tile has the positions of the keys.
            row_place = base + pair * 4
            masks, at = steps - step <= group, row_place + at_lse + stage * ROW_BYTES
            probabilities(scores, i32(pair - key), masks, at, scale_log2, words)
            store_scores(base + at_p + buffer, consumer * i32(4), line, lane, words)
            wait_scores(products)
            gradients(scores, products, row_place + at_delta, words)
            store_scores(base + at_ds + buffer, consumer * i32(4), line, lane, words)
            fence_proxy_async()
            # P and dS are whole; and since none comes here before its last dq is done, the other buffer is free.
            named_barrier_sync(1, 2 * WARPGROUP)
            own_boxes = consumer * (half_boxes * QUERY_BOX)
            start_keys(dv_acc, smem_descriptor(base + at_p + buffer), smem_descriptor(base + at_dout + own_boxes))
            start_keys(dk_acc, smem_descriptor(base + at_ds + buffer), smem_descriptor(q_tile + own_boxes))
            for part in range(2):
                start_dq(
                    dq_acc,
                    smem_descriptor(base + at_ds + buffer),
                    smem_descriptor(base + at_k + (2 * part + consumer) * key_box),
                )
                if part == 0:
                    wait_keys_2(dv_acc)
                    mbarrier_arrive(base + dout_empty)
                    wait_keys_1(dk_acc)
                    mbarrier_arrive(base + q_empty + stage * 8)
                wait_dq(dq_acc)
                mbarrier_wait(base + dq_empty, dq_parity)
                dq_parity ^= i32(1)
                for i in range(dq_accumulators // 4):
                    store_four(
                        own_dq + i * 2048, dq_acc[4 * i], dq_acc[4 * i + 1], dq_acc[4 * i + 2], dq_acc[4 * i + 3]
                    )
                fence_proxy_async()
                mbarrier_arrive(base + dq_full + part * 8)
            buffer ^= i32(SCORE_BYTES)
            stage += i32(1)
            if stage == q_stages:
                stage = i32(0)
                parity ^= i32(1)
        word = (lane & i32(3)) + consumer * i32(half_columns // 2)
        store_keys(dk_acc, scale, dk, first_row + key, alive - key, kv_head, word)
        store_keys(dv_acc, f32(1.0), dv, first_row + key, alive - key, kv_head, word)

    return consume


@specialize
def attention_products_kernel(tile):
    """The kernel of a Tile that computes dk, dv and the sums of dq."""
    keys, chains_together = tile.keys, tile.chains
    q_stages, dout_stages = tile.q_stages, tile.dout_stages
    places = layout(tile)
    k_full, v_full, q_full, q_empty = places.k_full, places.v_full, places.q_full, places.q_empty
    dout_full, dout_empty, dq_full, dq_empty = places.dout_full, places.dout_empty, places.dq_full, places.dq_empty
    setmaxnreg_dec, setmaxnreg_inc = setmaxnreg(FEW_REGISTERS, False), setmaxnreg(MANY_REGISTERS, True)
    bring, give = bring_function(tile), give_function(tile)
    consume = consume_wide_function(tile) if tile.wide else consume_function(tile)

    @cuda.jit(launch_bounds=(3 * WARPGROUP, 1))
    def attention_products_kernel(
        q_map, k_map, v_map, dout_map, rows, cu_seqlens, heads, max_seqlen, scale, tickets, counters, dq_sums, dk, dv
    ):
        """dk, dv (N, HK, E / 2, pairs of elements) and the float32 sums of dq, a run for each (query tile, head, part).

        In a run, each consumer's elements are as its threads hold them: float 4 t + c of each 512 is accumulator c of
        thread t. A block owns the keys of a tile and key head; step s is query tile s // group from the last, head
        s % group. Of the first warpgroup, warp 0 brings tiles, warps 1 and 2 give dq away.
        """
        thread = i32(cuda.threadIdx.x)
        role = warp_uniform(thread >> i32(7))
        base = Address((shared_address(cuda.shared.array(0, np.uint8)) + 1023) // 1024 * 1024)
        ticket = cuda.shared.array(1, np.int32)
        if thread == 0:
            ticket[0] = cuda.atomic.add(tickets, 0, 1)
            mbarrier_init(base + k_full, 1)
            mbarrier_init(base + v_full, 1)
            for own in range(2):
                mbarrier_init(base + dq_full + own * 8, 2 * WARPGROUP)
            mbarrier_init(base + dq_empty, 1)
            # A stage is empty when all warps of the consumers say so.
            for stage in range(q_stages):
                mbarrier_init(base + q_full + stage * 8, 1)
                mbarrier_init(base + q_empty + stage * 8, 2 * WARPGROUP)
            for stage in range(dout_stages):
                mbarrier_init(base + dout_full + stage * 8, 1)
                mbarrier_init(base + dout_empty + stage * 8, 2 * WARPGROUP)
            mbarrier_init_fence()
        cuda.syncthreads()

        kv_heads = i32(dk.shape[1])
        chains = kv_heads * i32(cu_seqlens.shape[0] - 1)
        order = warp_uniform(ticket[0])
        key_tiles = i32((max_seqlen + (keys - 1)) // keys)
        first_chain = i32(order // (key_tiles * chains_together) * chains_together)
        together = min(i32(chains_together), chains - first_chain)
        order -= first_chain * key_tiles
        chain = first_chain + order % together
        sequence, kv_head = chain // kv_heads, i32(chain % kv_heads)
        start = cu_seqlens[sequence]
        length = min(cu_seqlens[sequence + 1] - start, i32(max_seqlen))
        # Counted from the sequence's end, so that of all sequences the blocks with the most steps come first.
        key_tile = i32((length + (keys - 1)) // keys - key_tiles + order // together)
        if key_tile < 0:
            return
        group = i32(heads) // kv_heads
        first_key = key_tile * i32(keys)
        first_row = i32(start + first_key)
        query_tiles = i32((length - first_key + (QUERIES - 1)) // QUERIES)
        # Where rows, counters and sums of the last query tile and the group's first head lie.
        last_tile = start // QUERIES + sequence + first_key // QUERIES + query_tiles - 1
        place = i32(last_tile * heads + kv_head * group)

        if role == 0:
            setmaxnreg_dec()
            if thread == 0:
                q, dout = tensor_map_address(q_map), tensor_map_address(dout_map)
                k, v = tensor_map_address(k_map), tensor_map_address(v_map)
                bring(base, q, k, v, dout, rows, kv_head, group, i32(heads), first_row, query_tiles, place)
            elif thread == 32 or thread == 64:
                give(base, thread >> i32(6), dq_sums, counters, group, i32(heads), key_tile, query_tiles, place)
        else:
            setmaxnreg_inc()
            steps, alive = i32(query_tiles * group), length - first_key
            consume(base, role - i32(1), thread, group, steps, scale, kv_head, first_row, alive, dk, dv)

    return attention_products_kernel


@specialize
def attention_round_dq_kernel(tile):
    """The kernel of a Tile that rounds dq."""
    parts, run, dq_columns, words_of_row = tile.dq_parts, tile.run, tile.dq_columns, tile.head_dim // 2
    words = dq_columns // 2
    stride = words + 1
    pack_two = cvt_pack(tile.element)
    load_four, _ = vector_access(4, 4)

    @cuda.jit
    def attention_round_dq_kernel(dq_sums, cu_seqlens, scale, dq):
        """dq (N, H, E / 2, pairs of elements) = scale times its sums; a block owns what a consumer computed of a part.

        A thread takes what its like held in attention_products_kernel; the rows are put together in shared memory.
        """
        staged = cuda.shared.array((QUERIES, stride), np.int32)
        heads = dq.shape[1]
        sequence, consumer, thread = cuda.blockIdx.z, cuda.blockIdx.y % 2, cuda.threadIdx.x
        head, part = cuda.blockIdx.y // 2 % heads, cuda.blockIdx.y // 2 // heads
        start, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        first = start + i32(cuda.blockIdx.x) * i32(QUERIES)
        if first >= end:
            return
        place = i64(start // QUERIES + sequence + cuda.blockIdx.x) * heads + head
        at = (place * parts + part) * run + consumer * (run // 2) + thread * 4
        row, lane = thread // 32 * 16 + thread % 32 // 4, thread % 4
        sums = cuda.local.array(words, np.float32)
        for block in range(dq_columns // 8):
            load_four(dq_sums, at + block * 512, sums, block * 4)
        for block in range(dq_columns // 8):
            i, word = block * 4, block * 4 + lane
            staged[row, word] = pack_two(sums[i] * scale, sums[i + 1] * scale)
            staged[row + 8, word] = pack_two(sums[i + 2] * scale, sums[i + 3] * scale)
        cuda.syncthreads()
        word = thread % 32
        out_word = (part * 2 + consumer) * words + word
        if word < words and out_word < words_of_row:
            for r in range(thread // 32, min(end - first, QUERIES), 4):
                dq[first + r, head, out_word] = staged[r, word]

    return attention_round_dq_kernel


def sm90_attention_backward(dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv, tile=None):
    """As attention_backward, whose arguments these are, on a Hopper GPU; its arguments are checked there.

    q float16 or bfloat16, head_dim such that supports(head_dim). The same bits for the same arguments and Tile.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, sequences = k.shape[1], cu_seqlens.shape[0] - 1
    if not tokens or not max_seqlen:
        return
    tile = tile or Tile(head_dim, q.dtype.name)
    xp = device.xp()
    # Each sequence begins a new query tile.
    tiles = tokens // QUERIES + sequences
    rows = xp.empty(tiles * heads * 2 * QUERIES, np.float32)
    counters = xp.empty(tiles * heads * tile.dq_parts, np.int32)
    tickets = xp.empty(1, np.int32)
    dq_sums = xp.empty(tiles * heads * tile.dq_parts * tile.run, np.float32)
    query_tiles, key_tiles = -(-max_seqlen // QUERIES), -(-max_seqlen // tile.keys)
    launch(
        attention_rows_kernel(tile), (query_tiles, heads, sequences), 128,
        dout.view(np.int32), out.view(np.int32), lse, cu_seqlens, rows, counters, tickets,
    )  # fmt: skip
    q_map, dout_map = (tensor_map(x, QUERIES, 1, 64) for x in (q, dout))
    k_map, v_map = (tensor_map(x, tile.keys, 1, 64) for x in (k, v))
    launch(
        attention_products_kernel(tile), kv_heads * sequences * key_tiles, 3 * WARPGROUP,
        q_map, k_map, v_map, dout_map, rows, cu_seqlens, heads, max_seqlen, float(scale), tickets, counters, dq_sums,
        dk.view(np.int32), dv.view(np.int32), shared=tile.shared_bytes,
    )  # fmt: skip
    launch(
        attention_round_dq_kernel(tile), (query_tiles, 2 * heads * tile.dq_parts, sequences), 128,
        dq_sums, cu_seqlens, float(scale), dq.view(np.int32),
    )  # fmt: skip
