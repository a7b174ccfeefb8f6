"""Config and consumers of attention's gradient on sm90: the five GEMMs of a step, and the softmax backward.

See kernels/attention/sm90_backward.py for the design. A consumer is a warpgroup. Its threads hold S^T and dP^T, 64 keys
and `columns` queries, as wgmma leaves them: keys `key` and key + 8, queries 8 b + pair and the next, b = 0, 1, ...
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, fence_proxy_async, load_pair, stmatrix_x4, store_four
from rlnumba.kernels.ptx.sm90 import mbarrier_arrive, mbarrier_wait, named_barrier_sync
from rlnumba.kernels.ptx.warp import cvt_pack, device_function, exp2, udiv
from rlnumba.kernels.ptx.wgmma import WARPGROUP, WgmmaLayout, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring, shared_layout, swizzled_chunk
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

# Queries of a step; bytes of a TMA box of them, of their lse or delta, and of what they exchange with the block's keys.
QUERY_BITS = 6
QUERIES = 1 << QUERY_BITS
QUERY_BOX = QUERIES * LINE
ROW_BYTES = 4 * QUERIES
SCORE_BYTES = 2 * QUERIES * 128
LOG2_E = np.float32(math.log2(math.e))
MINUS_INFINITY = f32(-math.inf)
# A position of queries less that of a key which none of them sees.
NO_KEY = -(1 << 20)
# Positions are exact as floats below this, which is behind all of them.
BEHIND = 1 << 24


class AttentionBackwardConfig(NamedTuple):
    """The constants of the kernels. element: "float16" or "bfloat16".

    prefetch_scores: S^T of the next step is started before the wait for dq of this one (heads up to 128). chains: how
    many KV heads of sequences are worked on at the same time; on 132 SMs, 32 of them means four blocks of each.
    window: of sequences.py. prefixes: packed sequences may have PackedPrefixes.
    """

    head_dim: int
    element: str
    prefetch_scores: bool = True
    chains: int = 32
    window: int = 0
    prefixes: bool = False

    @property
    def has_positions(self):
        """Whether queries come with positions: neighbours in a tile may be of several sequences, and in windows."""
        return self.prefixes and self.window > 0

    @property
    def row_words(self):
        """Floats of a query of a head: lse, delta, and its position."""
        return 3 if self.has_positions else 2

    @property
    def wide(self):
        """Whether the consumers share the keys, half of the columns each: their registers hold no more."""
        return self.head_dim > 128

    @property
    def keys(self):
        return 64 if self.wide else 128

    @property
    def columns(self):
        """Columns that the GEMMs see; zeros beyond head_dim."""
        return -(-self.head_dim // 16) * 16

    @property
    def boxes(self):
        """TMA boxes of 64 columns that a row takes."""
        return 4 if self.wide else -(-self.columns // 64)

    @property
    def q_stages(self):
        return 2 if self.wide else 4 // self.boxes

    @property
    def dout_stages(self):
        return 1 if self.wide else self.q_stages

    @property
    def dq_parts(self):
        """Number of parts in which a step's dq is added; a part is two boxes of columns, or one."""
        return 2 if self.wide else 1

    @property
    def dq_columns(self):
        """Columns of a part that a consumer computes: one of two boxes, or half of the only one."""
        return 64 if self.boxes > 1 else self.columns // 2

    @property
    def dq_row_size(self):
        """Floats of a query in a part of dq: the first consumer's columns, then the second's."""
        return 2 * self.dq_columns

    @property
    def layout(self):
        """Shared memory: k, v [box | key]; q, dout [box | query]; ds [key], or [P | dS], twice; a part of dq."""
        kv_bytes, query_bytes = self.boxes * self.keys * LINE, self.boxes * QUERY_BOX
        q_stages, dout_stages = self.q_stages, self.dout_stages
        q_barriers, dout_barriers = q_stages * MBARRIER_BYTES, dout_stages * MBARRIER_BYTES
        # Before the barriers: a bulk copy writes to a multiple of 16 bytes.
        positions = {"position": q_stages * ROW_BYTES} if self.has_positions else {}
        return shared_layout(
            k=kv_bytes, v=kv_bytes, q=q_stages * query_bytes, dout=dout_stages * query_bytes, ds=2 * SCORE_BYTES,
            dq=4 * QUERIES * self.dq_row_size, lse=q_stages * ROW_BYTES, delta=dout_stages * ROW_BYTES,
            **positions, k_full=MBARRIER_BYTES, v_full=MBARRIER_BYTES, q_full=q_barriers, q_empty=q_barriers,
            dout_full=dout_barriers, dout_empty=dout_barriers, dq_full=2 * MBARRIER_BYTES, dq_empty=MBARRIER_BYTES,
            k_landed=MBARRIER_BYTES, v_landed=MBARRIER_BYTES, q_landed=q_barriers, dout_landed=dout_barriers,
        )  # fmt: skip


@functools.cache
def softmax_backward_functions(columns, element, window):
    """(probabilities, score_gradients) of 64 keys and `columns` queries, in place and rounded to 16 bits in words."""
    pack = cvt_pack(element)

    @device_function
    def probabilities(scores, position, is_diagonal, distance, lse, scale_log2, words):
        """P = exp2(S - lse) in place of S, rounded in `words`. lse: address; position: of `pair` less that of `key`.

        distance: with a window, the same of any tile; position is that of the last ones.
        """
        if is_diagonal:
            for block in range(columns // 8):
                for i in range(4):
                    if position < i32((i >> 1) * 8 - (i & 1) - block * 8):
                        scores[block * 4 + i] = MINUS_INFINITY
        # The difference is at most that of the last query and the first key.
        if window > 0 and distance >= window - QUERIES:
            for block in range(columns // 8):
                for i in range(4):
                    if distance >= i32((i >> 1) * 8 - (i & 1) - block * 8 + window):
                        scores[block * 4 + i] = MINUS_INFINITY
        for block in range(columns // 8):
            low, high = load_pair(lse + block * 32)
            i = block * 4
            scores[i] = exp2(scores[i] * scale_log2 - low)
            scores[i + 1] = exp2(scores[i + 1] * scale_log2 - high)
            scores[i + 2] = exp2(scores[i + 2] * scale_log2 - low)
            scores[i + 3] = exp2(scores[i + 3] * scale_log2 - high)
        for i in range(columns // 4):
            words[i] = pack(scores[2 * i], scores[2 * i + 1])

    @device_function
    def score_gradients(p, dp, delta, words):
        """dS = P (dP - delta), rounded. delta: address of query `pair`'s delta."""
        for block in range(columns // 8):
            low, high = load_pair(delta + block * 32)
            i = block * 4
            words[i // 2] = pack(p[i] * (dp[i] - low), p[i + 1] * (dp[i + 1] - high))
            words[i // 2 + 1] = pack(p[i + 2] * (dp[i + 2] - low), p[i + 3] * (dp[i + 3] - high))

    return probabilities, score_gradients


@functools.cache
def mask_positions_function(columns, window):
    """The device function that masks 64 keys and `columns` queries of any positions."""

    @device_function
    def mask_positions(scores, key, positions):
        """key: float, the position of the thread's first key; positions: address of that of query `pair`."""
        for block in range(columns // 8):
            low, high = load_pair(positions + block * 32)
            for i in range(4):
                distance = (high if i & 1 else low) - (key + f32((i >> 1) * 8))
                if distance < f32(0.0) or distance >= f32(window):
                    scores[block * 4 + i] = MINUS_INFINITY

    return mask_positions


@functools.cache
def store_scores_function(columns):
    """The device function that writes a warpgroup's words, 64 keys by `columns` queries, to swizzled lines."""

    @device_function
    def store_scores(box, first_chunk, line, lane, words):
        """box: address of line 0; a warp writes 16 lines from first_chunk on, a lane passes the address of `line`."""
        for block in range(columns // 16):
            chunk = first_chunk + block * 2 + (lane >> i32(4))
            stmatrix_x4(
                swizzled_chunk(box + line * LINE, line, chunk),
                words[4 * block],
                words[4 * block + 1],
                words[4 * block + 2],
                words[4 * block + 3],
            )

    return store_scores


@functools.cache
def dq_row_offset_function(config):
    """The device function that finds a row of a tile of dq, both in shared memory and in the sums of dq.

    A thread stores four accumulators at a time: two of row g and two of row g + 8 of each 16. Two such pairs of rows
    alternate every 64 bytes, so that eight lanes fill all banks. So a tile of fewer rows than QUERIES is the beginning
    of a whole one: dq_sum_rows.
    """
    row_size = config.dq_row_size

    @device_function
    def dq_row_offset(row, consumer):
        """The first float of a consumer's columns; the next eight columns are 32 floats further, two of them 4."""
        pair = row & i32(7)
        offset = (row >> i32(4)) * i32(16 * row_size) + (pair >> i32(1)) * i32(4 * row_size)
        return i32(
            offset + (pair & i32(1)) * i32(16) + ((row >> i32(3)) & i32(1)) * i32(2) + consumer * i32(2 * row_size)
        )

    return dq_row_offset


@device_function
def dq_sum_rows(rows):
    """The rows that the sums of a tile of so many rows take: at most nine more."""
    pairs = min(rows & i32(15), i32(8))
    return i32((rows & i32(-16)) + i32(2) * i32(i32(pairs + i32(1)) & i32(-2)))


@functools.cache
def store_dq_tile_function(config):
    """The device function that hands a consumer's dq of a step, or of a part of it, to the warps that add it."""
    accumulators, dq_empty = config.dq_columns // 2, config.layout.dq_empty

    @device_function
    def store_dq_tile(dq_acc, base, target, parity, full):
        """Wait until the buffer is empty, store to the thread's address `target`, arrive at the barrier `full`."""
        mbarrier_wait(base + dq_empty, parity)
        for i in range(accumulators // 4):
            store_four(target + i * 128, dq_acc[4 * i], dq_acc[4 * i + 1], dq_acc[4 * i + 2], dq_acc[4 * i + 3])
        fence_proxy_async()
        mbarrier_arrive(full)

    return store_dq_tile


@functools.cache
def epilogue_function(config, columns):
    """The device function that writes a thread's rows of dk and dv."""
    row_words, pack = config.head_dim // 2, cvt_pack(config.element)

    @device_function
    def store_rows(acc, scale, out, token, valid_rows, kv_head, first_word):
        """Rows token and token + 8 of out (N, HK, E / 2), where they are among the first valid_rows; times scale."""
        for half in range(2):
            if half * 8 < valid_rows:
                for block in range(columns // 8):
                    i = block * 4 + half * 2
                    word = first_word + block * 4
                    if word < row_words:
                        out[token + half * 8, kv_head, word] = pack(acc[i] * scale, acc[i + 1] * scale)

    @device_function
    def epilogue(dk_acc, dv_acc, scale, dk, dv, token, valid_rows, kv_head, first_word):
        store_rows(dk_acc, scale, dk, token, valid_rows, kv_head, first_word)
        store_rows(dv_acc, f32(1.0), dv, token, valid_rows, kv_head, first_word)

    return epilogue


@functools.cache
def consumer_function(config):
    """The device function of a consumer. Heads up to 128: it owns 64 keys of the block, and all their columns.

    Wider heads: it owns half the columns of the block's 64 keys, and computes S^T and dP^T of half the queries; P and
    dS reach the other consumer through shared memory.
    """
    element, wide, prefetch_scores = config.element, config.wide, config.prefetch_scores and not config.wide
    window, prefixes = config.window, config.prefixes
    queries, columns = (QUERIES // 2, 128) if wide else (QUERIES, config.columns)
    key_box, query_bytes = config.keys * LINE, config.boxes * QUERY_BOX
    # From the columns of K that the first consumer takes for dq to those of the second.
    dq_offset, dq_parts = key_box if config.boxes > 1 else columns, config.dq_parts
    accumulators, score_count, dq_accumulators = columns // 2, queries // 2, config.dq_columns // 2
    word_count, shared = score_count // 2, config.layout
    p_offset, ds_offset = shared.ds, shared.ds + (BOX_BYTES if wide else 0)
    # The last query tiles, which have the positions of the keys.
    diagonal_tiles, (_, advance) = config.keys // QUERIES, ring(config.q_stages)
    # S^T = K Q^T and dP^T = V dO^T, dV += P^T dO and dK += dS^T Q, dq = dS K.
    gemm_scores = wgmma_async(queries, element, config.columns // 16, "k", "k", False, WgmmaLayout(key_box, QUERY_BOX))
    gemm_dkv = wgmma_async(columns, element, QUERIES // 16, "k" if wide else "registers", "mn", True)
    gemm_dq = wgmma_async(config.dq_columns, element, config.keys // 16, "mn", "mn", False)
    wait_scores_1, wait_scores = wgmma_wait_group(score_count, 1), wgmma_wait_group(score_count, 0)
    # The GEMM for dq follows that for dk.
    wait_dv, wait_dk = wgmma_wait_group(accumulators, 2), wgmma_wait_group(accumulators, 1)
    wait_dq = wgmma_wait_group(dq_accumulators, 1 if prefetch_scores else 0)
    has_positions = config.has_positions
    probabilities, score_gradients = softmax_backward_functions(queries, element, 0 if has_positions else window)
    mask_positions = mask_positions_function(queries, window)
    position_offset = shared.position if has_positions else 0
    store_scores, store_dq_tile = store_scores_function(queries), store_dq_tile_function(config)
    dq_row_offset = dq_row_offset_function(config)
    epilogue = epilogue_function(config, columns)

    @device_function
    def consumer(base, index, thread, gqa_ratio, steps, scale, kv_head, first_row, valid_keys, dk, dv):
        """index: of the consumer, 0 or 1; first_row: of the block's keys; valid_keys: those inside the sequence."""
        lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
        first_key = i32(0) if wide else index * i32(64)
        first_query = index * i32(queries) if wide else i32(0)
        k_tile = smem_descriptor(base + shared.k + first_key * LINE)
        v_tile = smem_descriptor(base + shared.v + first_key * LINE)
        dq_row = dq_row_offset(warp * i32(16) + (lane >> i32(2)), index)
        dq_target = base + shared.dq + (dq_row + (lane & i32(3)) * i32(4)) * 4
        key = first_key + warp * i32(16) + (lane >> i32(2))
        pair = (lane & i32(3)) * i32(2) + first_query
        line = warp * i32(16) + (lane & i32(15))
        scores = cuda.local.array(score_count, np.float32)
        dp = cuda.local.array(score_count, np.float32)
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
        mbarrier_wait(base + shared.k_full, 0)
        if prefetch_scores:
            mbarrier_wait(base + shared.q_full, 0)
            gemm_scores(scores, k_tile, smem_descriptor(base + shared.q))
            wait_scores(scores)
        mbarrier_wait(base + shared.v_full, 0)
        for step in range(steps):
            dout_stage, dout_parity = (i32(0), i32(step & 1)) if wide else (stage, parity)
            q_tile, dout_tile = base + shared.q + stage * query_bytes, base + shared.dout + dout_stage * query_bytes
            if not prefetch_scores:
                mbarrier_wait(base + shared.q_full + stage * MBARRIER_BYTES, parity)
                gemm_scores(scores, k_tile, smem_descriptor(q_tile + first_query * LINE))
            mbarrier_wait(base + shared.dout_full + dout_stage * MBARRIER_BYTES, dout_parity)
            gemm_scores(dp, v_tile, smem_descriptor(dout_tile + first_query * LINE))
            if not prefetch_scores:
                wait_scores_1(scores)
            steps_left = steps - step
            position = i32(pair - key + (QUERIES if diagonal_tiles > 1 and steps_left > gqa_ratio else 0))
            is_diagonal = steps_left <= diagonal_tiles * gqa_ratio
            if has_positions:
                first = f32(first_row + key) if key < valid_keys else f32(BEHIND)
                mask_positions(scores, first, base + position_offset + stage * ROW_BYTES + pair * 4)
                is_diagonal = False
            elif prefixes:
                # Queries of children see no key beyond the prefix. Its length, like a warp's keys, is in whole 16.
                if key >= valid_keys:
                    position, is_diagonal = i32(NO_KEY), True
            # The positions of the step's queries less those of the keys.
            distance = i32(0)
            if window > 0 and not has_positions:
                distance = i32(pair - key + udiv(i32(steps_left - 1), gqa_ratio) * QUERIES)
            lse, delta = base + shared.lse + stage * ROW_BYTES, base + shared.delta + dout_stage * ROW_BYTES
            probabilities(scores, position, is_diagonal, distance, lse + pair * 4, scale_log2, p_words)
            if wide:
                store_scores(base + p_offset + buffer, first_query >> i32(3), line, lane, p_words)
            wait_scores(dp)
            if not wide:
                gemm_dkv(dv_acc, p_words, smem_descriptor(dout_tile))
            score_gradients(scores, dp, delta + pair * 4, ds_words)
            ds_lines = base + ds_offset + buffer + first_key * LINE
            store_scores(ds_lines, first_query >> i32(3), line, lane, ds_words)
            if not wide:
                gemm_dkv(dk_acc, ds_words, smem_descriptor(q_tile))
            fence_proxy_async()
            # Both consumers' P and dS are stored; and both have read the other buffer, since their last dq is complete.
            named_barrier_sync(1, 2 * WARPGROUP)
            ds_tile = smem_descriptor(base + ds_offset + buffer)
            if wide:
                half_box = index * (2 * QUERY_BOX)
                gemm_dkv(dv_acc, smem_descriptor(base + p_offset + buffer), smem_descriptor(dout_tile + half_box))
                gemm_dkv(dk_acc, ds_tile, smem_descriptor(q_tile + half_box))
            for part in range(dq_parts):
                gemm_dq(dq_acc, ds_tile, smem_descriptor(base + shared.k + index * dq_offset + part * (2 * key_box)))
                if part == 0:
                    wait_dv(dv_acc)
                    mbarrier_arrive(base + shared.dout_empty + dout_stage * MBARRIER_BYTES)
                    wait_dk(dk_acc)
                    mbarrier_arrive(base + shared.q_empty + stage * MBARRIER_BYTES)
                    stage, parity = advance(stage, parity)
                if prefetch_scores:
                    # After the last step this multiplies an old tile, and the result is unused.
                    if step + 1 < steps:
                        mbarrier_wait(base + shared.q_full + stage * MBARRIER_BYTES, parity)
                    gemm_scores(scores, k_tile, smem_descriptor(base + shared.q + stage * query_bytes))
                wait_dq(dq_acc)
                full = base + shared.dq_full + (part if wide else step & 1) * MBARRIER_BYTES
                store_dq_tile(dq_acc, base, dq_target, dq_parity, full)
                dq_parity ^= i32(1)
            buffer ^= i32(SCORE_BYTES)
            if prefetch_scores:
                # wgmma groups in flight from one iteration of the loop to the next make ptxas wait for each of them.
                wait_scores(scores)
        first_word = (lane & i32(3)) + (index * i32(columns // 2) if wide else i32(0))
        epilogue(dk_acc, dv_acc, scale, dk, dv, first_row + key, valid_keys - key, kv_head, first_word)

    return consumer
