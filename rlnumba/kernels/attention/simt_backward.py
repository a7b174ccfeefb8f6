"""The gradient of causal attention without tensor cores, for any GPU, dtype and shape: float32, no float atomics.

The equations are those of kernels/attention/ops.py. p is recomputed from q, k and lse. Three kernels: delta; dq, whose
blocks own query rows and pass over the keys; dk and dv, whose blocks own keys and pass over the query rows. Each sum is
taken by one thread in the order of the keys or rows, so equal inputs give equal bits.
Source: Dao et al. 2022 (FlashAttention), algorithm 4.
"""

import math

import numpy as np

from rlnumba.kernels.attention.delta import attention_delta
from rlnumba.kernels.attention.simt import (
    SCORE_STRIDE,
    TILE_KEYS,
    accumulate_function,
    dot_products_function,
    load_rows_function,
    prefill_config,
    row_indices_function,
    store_rows_function,
)
from rlnumba.kernels.ptx.warp import sync_warp
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize


@specialize
def attention_dq_kernel(config):
    """The kernel of dq for a SimtAttentionConfig."""
    _, rows, lanes, threads = config
    rows_per_thread, keys_per_thread = config.rows_per_thread, config.keys_per_thread
    stride, warp_rows, warp_tile_rows = config.stride, rows // (threads // 32), TILE_KEYS // (threads // 32)
    score_count, acc_count = rows_per_thread * keys_per_thread, rows_per_thread * config.columns
    # Shared memory in floats: rows of q and dout, keys, values, then ds of a tile.
    dout_tile = rows * stride
    key_tile = dout_tile + rows * stride
    value_tile = key_tile + TILE_KEYS * stride
    score_tile = value_tile + TILE_KEYS * stride
    dot_products, accumulate = dot_products_function(config), accumulate_function(config)
    block_indices, load_block = row_indices_function(config, rows), load_rows_function(config, rows)
    tile_indices, load_tile = row_indices_function(config, TILE_KEYS), load_rows_function(config, TILE_KEYS)
    store_rows = store_rows_function(config)

    @cuda.jit
    def attention_dq_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dq):
        """A block owns `rows` rows of a KV head of a sequence, as in attention; one pass over their keys."""
        shared = cuda.shared.array(0, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        gradients = cuda.local.array(score_count, np.float32)
        acc = cuda.local.array(acc_count, np.float32)
        row_lse = cuda.local.array(rows_per_thread, np.float32)
        row_delta = cuda.local.array(rows_per_thread, np.float32)
        sums = cuda.local.array(rows_per_thread, np.float32)
        tokens = cuda.local.array(warp_rows, np.int64)
        heads = cuda.local.array(warp_rows, np.int64)
        tile_tokens = cuda.local.array(warp_tile_rows, np.int64)
        tile_heads = cuda.local.array(warp_tile_rows, np.int64)
        thread = cuda.threadIdx.x & (threads - 1)
        lane = thread % lanes
        thread_row = thread // lanes * rows_per_thread
        kv_head = cuda.blockIdx.y
        start = cu_seqlens[cuda.blockIdx.z]
        length = cu_seqlens[cuda.blockIdx.z + 1] - start
        gqa_ratio = q.shape[1] // k.shape[1]
        first_row = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows
        valid_rows = min(length * gqa_ratio - first_row, rows)
        if valid_rows <= 0:
            return
        warp_is_valid = thread // 32 * warp_rows < valid_rows

        block_indices(start, kv_head, gqa_ratio, first_row, valid_rows, tokens, heads)
        load_block(shared, 0, q, tokens, heads, valid_rows, scale)
        load_block(shared, dout_tile, dout, tokens, heads, valid_rows, np.float32(1.0))
        for i in range(rows_per_thread):
            row_lse[i] = np.float32(0.0)
            row_delta[i] = np.float32(0.0)
            if thread_row + i < valid_rows:
                index = first_row + thread_row + i
                row_lse[i] = lse[kv_head * gqa_ratio + index % gqa_ratio, start + index // gqa_ratio]
                row_delta[i] = delta[kv_head * gqa_ratio + index % gqa_ratio, start + index // gqa_ratio]
        for i in range(acc_count):
            acc[i] = np.float32(0.0)

        for tile_start in range(0, (first_row + valid_rows - 1) // gqa_ratio + 1, TILE_KEYS):
            tile_keys = min(length - tile_start, TILE_KEYS)
            cuda.syncthreads()
            tile_indices(start, kv_head, 1, tile_start, tile_keys, tile_tokens, tile_heads)
            load_tile(shared, key_tile, k, tile_tokens, tile_heads, tile_keys, np.float32(1.0))
            load_tile(shared, value_tile, v, tile_tokens, tile_heads, tile_keys, np.float32(1.0))
            cuda.syncthreads()
            if not warp_is_valid:
                continue
            dot_products(shared, thread_row * stride, key_tile + lane * stride, scores)
            dot_products(shared, dout_tile + thread_row * stride, value_tile + lane * stride, gradients)
            for i in range(rows_per_thread):
                position = (first_row + thread_row + i) // gqa_ratio
                for c in range(keys_per_thread):
                    ds = np.float32(0.0)
                    if tile_start + lane + c * lanes <= position:
                        p = math.exp(scores[i * keys_per_thread + c] - row_lse[i])
                        ds = p * (gradients[i * keys_per_thread + c] - row_delta[i])
                    shared[score_tile + (thread_row + i) * SCORE_STRIDE + lane + c * lanes] = ds
            sync_warp()
            accumulate(shared, score_tile + thread_row * SCORE_STRIDE, key_tile + lane, acc, sums)

        if not warp_is_valid:
            return
        for i in range(rows_per_thread):
            sums[i] = scale
        store_rows(shared, 0, acc, sums, start, kv_head, gqa_ratio, first_row, valid_rows, dq)

    return attention_dq_kernel


@specialize
def attention_dkv_kernel(config):
    """The kernel of dk and dv for a SimtAttentionConfig: its rows are keys here, its TILE_KEYS keys query rows."""
    _, rows, lanes, threads = config
    rows_per_thread, keys_per_thread = config.rows_per_thread, config.keys_per_thread
    stride, warp_rows, warp_tile_rows = config.stride, rows // (threads // 32), TILE_KEYS // (threads // 32)
    score_count, acc_count = rows_per_thread * keys_per_thread, rows_per_thread * config.columns
    # Shared memory in floats: the block's keys and values, rows of q and dout, p or ds, lse and delta of the rows.
    value_tile = rows * stride
    query_tile = value_tile + rows * stride
    dout_tile = query_tile + TILE_KEYS * stride
    score_tile = dout_tile + TILE_KEYS * stride
    lse_tile = score_tile + rows * SCORE_STRIDE
    delta_tile = lse_tile + TILE_KEYS
    dot_products, accumulate = dot_products_function(config), accumulate_function(config)
    block_indices, load_block = row_indices_function(config, rows), load_rows_function(config, rows)
    tile_indices, load_tile = row_indices_function(config, TILE_KEYS), load_rows_function(config, TILE_KEYS)
    store_rows = store_rows_function(config)

    @cuda.jit
    def attention_dkv_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dk, dv):
        """A block owns `rows` keys of a KV head of a sequence; one pass over the query rows that see them.

        A query row is a token and one of the KV head's query heads, as in attention. A thread owns rows_per_thread
        keys; of p and ds its rows are lane, lane + lanes, ...; of dk and dv its columns likewise.
        """
        shared = cuda.shared.array(0, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        gradients = cuda.local.array(score_count, np.float32)
        dk_acc = cuda.local.array(acc_count, np.float32)
        dv_acc = cuda.local.array(acc_count, np.float32)
        sums = cuda.local.array(rows_per_thread, np.float32)
        tokens = cuda.local.array(warp_rows, np.int64)
        heads = cuda.local.array(warp_rows, np.int64)
        tile_tokens = cuda.local.array(warp_tile_rows, np.int64)
        tile_heads = cuda.local.array(warp_tile_rows, np.int64)
        thread = cuda.threadIdx.x & (threads - 1)
        lane = thread % lanes
        thread_key = thread // lanes * rows_per_thread
        kv_head = cuda.blockIdx.y
        start = cu_seqlens[cuda.blockIdx.z]
        length = cu_seqlens[cuda.blockIdx.z + 1] - start
        gqa_ratio = q.shape[1] // k.shape[1]
        first_key = cuda.blockIdx.x * rows
        valid_keys = min(length - first_key, rows)
        if valid_keys <= 0:
            return
        warp_is_valid = thread // 32 * warp_rows < valid_keys

        block_indices(start, kv_head, 1, first_key, valid_keys, tokens, heads)
        load_block(shared, 0, k, tokens, heads, valid_keys, np.float32(1.0))
        load_block(shared, value_tile, v, tokens, heads, valid_keys, np.float32(1.0))
        for i in range(acc_count):
            dk_acc[i] = np.float32(0.0)
            dv_acc[i] = np.float32(0.0)

        for tile_start in range(first_key * gqa_ratio // TILE_KEYS * TILE_KEYS, length * gqa_ratio, TILE_KEYS):
            tile_rows = min(length * gqa_ratio - tile_start, TILE_KEYS)
            cuda.syncthreads()
            tile_indices(start, kv_head, gqa_ratio, tile_start, tile_rows, tile_tokens, tile_heads)
            load_tile(shared, query_tile, q, tile_tokens, tile_heads, tile_rows, scale)
            load_tile(shared, dout_tile, dout, tile_tokens, tile_heads, tile_rows, np.float32(1.0))
            if thread < TILE_KEYS:
                index = tile_start + min(thread, tile_rows - 1)
                head, token = kv_head * gqa_ratio + index % gqa_ratio, start + index // gqa_ratio
                shared[lse_tile + thread] = lse[head, token]
                shared[delta_tile + thread] = delta[head, token]
            cuda.syncthreads()
            if not warp_is_valid:
                continue
            dot_products(shared, thread_key * stride, query_tile + lane * stride, scores)
            dot_products(shared, value_tile + thread_key * stride, dout_tile + lane * stride, gradients)
            for i in range(rows_per_thread):
                for c in range(keys_per_thread):
                    row = lane + c * lanes
                    p = np.float32(0.0)
                    if row < tile_rows and first_key + thread_key + i <= (tile_start + row) // gqa_ratio:
                        p = np.float32(math.exp(scores[i * keys_per_thread + c] - shared[lse_tile + row]))
                    shared[score_tile + (thread_key + i) * SCORE_STRIDE + row] = p
                    gradients[i * keys_per_thread + c] = p * (
                        gradients[i * keys_per_thread + c] - shared[delta_tile + row]
                    )
            # p, then ds, of a key are written and read by the threads of one warp.
            sync_warp()
            accumulate(shared, score_tile + thread_key * SCORE_STRIDE, dout_tile + lane, dv_acc, sums)
            sync_warp()
            for i in range(rows_per_thread):
                for c in range(keys_per_thread):
                    at = score_tile + (thread_key + i) * SCORE_STRIDE + lane + c * lanes
                    shared[at] = gradients[i * keys_per_thread + c]
            sync_warp()
            accumulate(shared, score_tile + thread_key * SCORE_STRIDE, query_tile + lane, dk_acc, sums)

        if not warp_is_valid:
            return
        for i in range(rows_per_thread):
            sums[i] = np.float32(1.0)
        store_rows(shared, 0, dk_acc, sums, start, kv_head, 1, first_key, valid_keys, dk)
        store_rows(shared, value_tile, dv_acc, sums, start, kv_head, 1, first_key, valid_keys, dv)

    return attention_dkv_kernel


def attention_backward_simt(dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv):
    """As the operator attention_backward, which has checked the arguments."""
    _, heads, head_dim = q.shape
    kv_heads, sequences = k.shape[1], len(cu_seqlens) - 1
    config = prefill_config(head_dim, row_tiles=2)
    shared = config.shared_bytes(row_tiles=2)
    arguments = (dout, q, k, v, lse, attention_delta(dout, out), cu_seqlens, float(scale))
    grid = (-(-max_seqlen * (heads // kv_heads) // config.rows), kv_heads, sequences)
    launch(attention_dq_kernel(config), grid, config.threads, *arguments, dq, shared=shared)
    grid = (-(-max_seqlen // config.rows), kv_heads, sequences)
    launch(attention_dkv_kernel(config), grid, config.threads, *arguments, dk, dv, shared=shared)
