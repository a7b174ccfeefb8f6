"""The consumers of attention's gradient on sm90: the five GEMMs of a step, and the softmax backward between them.

See kernels/attention/sm90_backward.py for the design. A consumer is a warpgroup. Its threads hold S^T and dP^T, 64 keys
and `columns` queries, as wgmma leaves them: keys `key` and key + 8, queries 8 b + pair and the next, b = 0, 1, ...
"""

import functools
import math

import numpy as np

from rlnumba.kernels.attention.sm90_backward_config import (
    LOG2_E,
    QUERIES,
    QUERY_BOX,
    ROW_BYTES,
    SCORE_BYTES,
    WARPGROUP,
    layout,
)
from rlnumba.kernels.ptx.pipeline import MBARRIER_BYTES, ring, swizzled_chunk
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, fence_proxy_async, load_pair, stmatrix_x4, store_four
from rlnumba.kernels.ptx.sm90 import mbarrier_arrive, mbarrier_wait, named_barrier_sync
from rlnumba.kernels.ptx.warp import cvt_pack, device_function, exp2
from rlnumba.kernels.ptx.wgmma import smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

MINUS_INFINITY = f32(-math.inf)


@functools.cache
def softmax_backward_functions(columns, element):
    """(probabilities, score_gradients) of 64 keys and `columns` queries, in place and rounded to 16 bits in words."""
    pack = cvt_pack(element)

    @device_function
    def probabilities(scores, position, is_diagonal, lse, scale_log2, words):
        """P = exp2(S - lse) in place of S, and rounded in `words`. lse: address of that of query `pair`.

        If is_diagonal, queries do not see keys of later positions; position: that of `pair` less that of `key`.
        """
        if is_diagonal:
            for block in range(columns // 8):
                for i in range(4):
                    if position < i32((i >> 1) * 8 - (i & 1) - block * 8):
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
        """dS = P (dP - delta), rounded. delta: address of that of query `pair`."""
        for block in range(columns // 8):
            low, high = load_pair(delta + block * 32)
            i = block * 4
            words[i // 2] = pack(p[i] * (dp[i] - low), p[i + 1] * (dp[i + 1] - high))
            words[i // 2 + 1] = pack(p[i + 2] * (dp[i + 2] - low), p[i + 3] * (dp[i + 3] - high))

    return probabilities, score_gradients


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
def store_dq_tile_function(config):
    """The device function that hands a consumer's dq of a step, or of a part of it, to the warps that add it."""
    accumulators, dq_empty = config.dq_columns // 2, layout(config).dq_empty

    @device_function
    def store_dq_tile(dq_acc, base, target, parity, full):
        """Wait until the buffer is empty, store to the thread's address `target`, arrive at the barrier `full`."""
        mbarrier_wait(base + dq_empty, parity)
        for i in range(accumulators // 4):
            store_four(target + i * 2048, dq_acc[4 * i], dq_acc[4 * i + 1], dq_acc[4 * i + 2], dq_acc[4 * i + 3])
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
        """first_word: the thread's first pair of columns of a row."""
        store_rows(dk_acc, scale, dk, token, valid_rows, kv_head, first_word)
        store_rows(dv_acc, f32(1.0), dv, token, valid_rows, kv_head, first_word)

    return epilogue


@functools.cache
def consumer_function(config):
    """The device function of a consumer that owns 64 keys of the block, all their columns; heads up to 128."""
    element, prefetch_scores, columns = config.element, config.prefetch_scores, config.columns
    key_box, query_bytes = config.keys * LINE, config.boxes * QUERY_BOX
    # From the columns of K that the first consumer takes for dq to those of the second.
    dq_offset = key_box if config.boxes > 1 else columns
    accumulators, score_count, dq_accumulators = columns // 2, QUERIES // 2, config.dq_columns // 2
    word_count, dq_bytes, shared = score_count // 2, 2 * config.dq_part_size, layout(config)
    _, advance = ring(config.q_stages)
    # S^T = K Q^T and dP^T = V dO^T, dV += P^T dO and dK += dS^T Q, dq = dS K.
    gemm_scores = wgmma_async(QUERIES, element, columns // 16, "k", "k", False, key_box, QUERY_BOX)
    gemm_dkv = wgmma_async(columns, element, QUERIES // 16, "registers", "mn", True)
    gemm_dq = wgmma_async(config.dq_columns, element, config.keys // 16, "mn", "mn", False)
    wait_scores_1, wait_scores = wgmma_wait_group(score_count, 1), wgmma_wait_group(score_count, 0)
    # The GEMM for dq follows that for dk.
    wait_dv, wait_dk = wgmma_wait_group(accumulators, 2), wgmma_wait_group(accumulators, 1)
    wait_dq = wgmma_wait_group(dq_accumulators, 1 if prefetch_scores else 0)
    probabilities, score_gradients = softmax_backward_functions(QUERIES, element)
    store_scores, store_dq_tile = store_scores_function(QUERIES), store_dq_tile_function(config)
    epilogue = epilogue_function(config, columns)

    @device_function
    def consumer(base, index, thread, gqa_ratio, steps, scale, kv_head, first_row, valid_keys, dk, dv):
        """index: of the consumer, 0 or 1; first_row: of the block's keys; valid_keys: those inside the sequence."""
        lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
        k_tile = smem_descriptor(base + shared.k + index * BOX_BYTES)
        v_tile = smem_descriptor(base + shared.v + index * BOX_BYTES)
        k_columns = smem_descriptor(base + shared.k + index * dq_offset)
        ds_lines = base + shared.ds + index * BOX_BYTES
        dq_target = base + shared.dq + index * dq_bytes + (thread & i32(127)) * 16
        key = index * i32(64) + warp * i32(16) + (lane >> i32(2))
        pair = (lane & i32(3)) * i32(2)
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
        stage, parity, ds_buffer, dq_parity = i32(0), i32(0), i32(0), i32(1)
        mbarrier_wait(base + shared.k_full, 0)
        if prefetch_scores:
            mbarrier_wait(base + shared.q_full, 0)
            gemm_scores(scores, k_tile, smem_descriptor(base + shared.q))
            wait_scores(scores)
        mbarrier_wait(base + shared.v_full, 0)
        for step in range(steps):
            q_tile = smem_descriptor(base + shared.q + stage * query_bytes)
            dout_tile = smem_descriptor(base + shared.dout + stage * query_bytes)
            if not prefetch_scores:
                mbarrier_wait(base + shared.q_full + stage * MBARRIER_BYTES, parity)
                gemm_scores(scores, k_tile, q_tile)
            mbarrier_wait(base + shared.dout_full + stage * MBARRIER_BYTES, parity)
            gemm_scores(dp, v_tile, dout_tile)
            if not prefetch_scores:
                wait_scores_1(scores)
            # The last two query tiles have the positions of the keys.
            steps_left = steps - step
            position = i32(pair - key + (QUERIES if steps_left > gqa_ratio else 0))
            row_offset = base + stage * ROW_BYTES + pair * 4
            probabilities(scores, position, steps_left <= 2 * gqa_ratio, row_offset + shared.lse, scale_log2, p_words)
            wait_scores(dp)
            gemm_dkv(dv_acc, p_words, dout_tile)
            score_gradients(scores, dp, row_offset + shared.delta, ds_words)
            store_scores(ds_lines + ds_buffer, i32(0), line, lane, ds_words)
            gemm_dkv(dk_acc, ds_words, q_tile)
            fence_proxy_async()
            # Both consumers' dS are stored; and both have read the other buffer, since their last dq is complete.
            named_barrier_sync(1, 2 * WARPGROUP)
            gemm_dq(dq_acc, smem_descriptor(base + shared.ds + ds_buffer), k_columns)
            ds_buffer ^= i32(SCORE_BYTES)
            wait_dv(dv_acc)
            mbarrier_arrive(base + shared.dout_empty + stage * MBARRIER_BYTES)
            wait_dk(dk_acc)
            mbarrier_arrive(base + shared.q_empty + stage * MBARRIER_BYTES)
            stage, parity = advance(stage, parity)
            if prefetch_scores:
                # After the last step this multiplies an old tile, and the result is unused.
                if step + 1 < steps:
                    mbarrier_wait(base + shared.q_full + stage * MBARRIER_BYTES, parity)
                gemm_scores(scores, k_tile, smem_descriptor(base + shared.q + stage * query_bytes))
            wait_dq(dq_acc)
            store_dq_tile(dq_acc, base, dq_target, dq_parity, base + shared.dq_full + (step & 1) * MBARRIER_BYTES)
            dq_parity ^= i32(1)
            if prefetch_scores:
                # wgmma groups in flight from one iteration of the loop to the next make ptxas wait for each of them.
                wait_scores(scores)
        epilogue(dk_acc, dv_acc, scale, dk, dv, first_row + key, valid_keys - key, kv_head, lane & i32(3))

    return consumer


@functools.cache
def wide_consumer_function(config):
    """The device function of a consumer that owns half the columns of the block's 64 keys; heads up to 256.

    It computes S^T and dP^T of half the queries; P and dS reach the other consumer through shared memory.
    """
    element, columns = config.element, config.columns
    half_queries, half_boxes, half_columns = QUERIES // 2, config.boxes // 2, 128
    key_box, query_bytes = config.keys * LINE, config.boxes * QUERY_BOX
    accumulators, score_count, dq_accumulators = half_columns // 2, half_queries // 2, config.dq_columns // 2
    word_count, dq_bytes, shared = score_count // 2, 2 * config.dq_part_size, layout(config)
    p_offset, ds_offset = shared.ds, shared.ds + BOX_BYTES
    _, advance = ring(config.q_stages)
    gemm_scores = wgmma_async(half_queries, element, columns // 16, "k", "k", False, key_box, QUERY_BOX)
    gemm_dkv = wgmma_async(half_columns, element, QUERIES // 16, "k", "mn", True)
    gemm_dq = wgmma_async(config.dq_columns, element, config.keys // 16, "mn", "mn", False)
    wait_scores_1, wait_scores = wgmma_wait_group(score_count, 1), wgmma_wait_group(score_count, 0)
    wait_dv, wait_dk = wgmma_wait_group(accumulators, 2), wgmma_wait_group(accumulators, 1)
    wait_dq = wgmma_wait_group(dq_accumulators, 0)
    probabilities, score_gradients = softmax_backward_functions(half_queries, element)
    store_scores, store_dq_tile = store_scores_function(half_queries), store_dq_tile_function(config)
    epilogue = epilogue_function(config, half_columns)

    @device_function
    def consumer(base, index, thread, gqa_ratio, steps, scale, kv_head, first_row, valid_keys, dk, dv):
        """As consumer_function's."""
        lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
        k_tile, v_tile = smem_descriptor(base + shared.k), smem_descriptor(base + shared.v)
        dq_target = base + shared.dq + index * dq_bytes + (thread & i32(127)) * 16
        key = warp * i32(16) + (lane >> i32(2))
        pair = (lane & i32(3)) * i32(2) + index * i32(half_queries)
        line = warp * i32(16) + (lane & i32(15))
        scores = cuda.local.array(score_count, np.float32)
        dp = cuda.local.array(score_count, np.float32)
        words = cuda.local.array(word_count, np.int32)
        dk_acc = cuda.local.array(accumulators, np.float32)
        dv_acc = cuda.local.array(accumulators, np.float32)
        dq_acc = cuda.local.array(dq_accumulators, np.float32)
        for i in range(accumulators):
            dk_acc[i] = f32(0.0)
            dv_acc[i] = f32(0.0)
        scale_log2 = scale * LOG2_E
        stage, parity, p_buffer, dq_parity = i32(0), i32(0), i32(0), i32(1)
        mbarrier_wait(base + shared.k_full, 0)
        mbarrier_wait(base + shared.v_full, 0)
        for step in range(steps):
            q_tile = base + shared.q + stage * query_bytes
            mbarrier_wait(base + shared.q_full + stage * MBARRIER_BYTES, parity)
            gemm_scores(scores, k_tile, smem_descriptor(q_tile + index * (half_queries * LINE)))
            mbarrier_wait(base + shared.dout_full, i32(step & 1))
            gemm_scores(dp, v_tile, smem_descriptor(base + shared.dout + index * (half_queries * LINE)))
            wait_scores_1(scores)
            # The last query tile has the positions of the keys.
            row_offset = base + pair * 4
            is_diagonal, lse = steps - step <= gqa_ratio, row_offset + shared.lse + stage * ROW_BYTES
            probabilities(scores, i32(pair - key), is_diagonal, lse, scale_log2, words)
            store_scores(base + p_offset + p_buffer, index * i32(4), line, lane, words)
            wait_scores(dp)
            score_gradients(scores, dp, row_offset + shared.delta, words)
            store_scores(base + ds_offset + p_buffer, index * i32(4), line, lane, words)
            fence_proxy_async()
            # Both consumers' P and dS are stored; and both have read the other buffer, since their last dq is complete.
            named_barrier_sync(1, 2 * WARPGROUP)
            half_box = index * (half_boxes * QUERY_BOX)
            p_tile, ds_tile = smem_descriptor(base + p_offset + p_buffer), smem_descriptor(base + ds_offset + p_buffer)
            gemm_dkv(dv_acc, p_tile, smem_descriptor(base + shared.dout + half_box))
            gemm_dkv(dk_acc, ds_tile, smem_descriptor(q_tile + half_box))
            for part in range(2):
                gemm_dq(dq_acc, ds_tile, smem_descriptor(base + shared.k + (2 * part + index) * key_box))
                if part == 0:
                    wait_dv(dv_acc)
                    mbarrier_arrive(base + shared.dout_empty)
                    wait_dk(dk_acc)
                    mbarrier_arrive(base + shared.q_empty + stage * MBARRIER_BYTES)
                wait_dq(dq_acc)
                store_dq_tile(dq_acc, base, dq_target, dq_parity, base + shared.dq_full + part * MBARRIER_BYTES)
                dq_parity ^= i32(1)
            p_buffer ^= i32(SCORE_BYTES)
            stage, parity = advance(stage, parity)
        first_word = (lane & i32(3)) + index * i32(half_columns // 2)
        epilogue(dk_acc, dv_acc, scale, dk, dv, first_row + key, valid_keys - key, kv_head, first_word)

    return consumer
