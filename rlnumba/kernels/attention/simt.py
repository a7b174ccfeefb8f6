"""Causal attention without tensor cores, for any GPU, dtype and shape: float32 throughout.

The equations are those of kernels/attention/ops.py. What a row (a query head of a token) computes, in this order,
wherever it is in whatever batch:

    for each tile of TILE_KEYS keys, the tiles fixed by the keys' absolute positions:
        s_j = fma chain over e of (scale * q_e) * k_je          for each key j of the tile; -inf beyond the row
        new = max(m, max_j s_j)      rescale = exp(m - new)      p_j = exp(s_j - new)      m = new
        l = fma(l, rescale, p_0 + p_1 + ...)                    in the order of the keys
        acc_e = fma chain over j of p_j * v_je, starting from acc_e * rescale
    out_e = acc_e * (1 / l)      lse = m + log(l)

Only the maximum is taken across threads, and it is exact in any order. So the bits of a row depend neither on the shape
of a block, nor on the other rows of it, nor on where a key is stored: paged attention runs the same device function and
gets the same bits. Keys beyond a row change nothing: p = 0 and rescale = 1.
Source: Dao et al. 2022 (FlashAttention), algorithm 1.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.warp import device_function, narrow, shuffle_xor, sync_warp, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Keys of a tile. Part of the arithmetic: the row max changes at the borders of the tiles.
TILE_KEYS = 32
# Floats from one row of scores to the next in shared memory; odd, as SimtAttentionConfig.stride.
SCORE_STRIDE = TILE_KEYS + 1
# Columns or keys that the inner loops take at once; rows in shared memory are padded with zeros to a multiple of it.
UNROLL = 4
# Global loads in flight per thread: on an H200 (64 x 640 tokens, 16 and 8 heads of 128, bfloat16) 8, 16, 32 give
# forward 13.5, 13.7, 17.1 TFLOP/s and decode of 64 x 512 tokens 697, 519, 1128 GB/s of keys and values.
LOADS_IN_FLIGHT = 32
# All offsets in shared memory fit in these bits; masking with it spares the inner loops a test for negative indices.
OFFSET_MASK = 0xFFFF
MINUS_INFINITY = np.float32(-np.inf)


class SimtAttentionConfig(NamedTuple):
    """The shape of a block: `lanes` neighbouring threads of a warp share rows * lanes / threads of its rows."""

    head_dim: int
    rows: int
    lanes: int
    threads: int

    @property
    def rows_per_thread(self):
        return self.rows * self.lanes // self.threads

    @property
    def keys_per_thread(self):
        """Scores of a row that a thread computes: of the keys lane, lane + lanes, ... of the tile."""
        return TILE_KEYS // self.lanes

    @property
    def columns(self):
        """Columns of a row that a thread sums: lane, lane + lanes, ..."""
        return -(-self.head_dim // self.lanes)

    @property
    def stride(self):
        """Floats from one row to the next in shared memory: odd, so that a column touches all banks."""
        return self.columns * self.lanes + 1

    def shared_bytes(self, row_tiles=1):
        """For row_tiles arrays of the block's rows, two of TILE_KEYS rows, the scores and two numbers a key."""
        return 4 * (self.stride * (row_tiles * self.rows + 2 * TILE_KEYS) + self.rows * SCORE_STRIDE + 2 * TILE_KEYS)


def decode_config(head_dim):
    """For few rows: a warp owns two rows, so that the rows that share a KV head spread over warps.

    8 rows, 32 lanes; H200, 64 x 512 tokens, 16 and 8 heads of 128: 1.35x over 256 threads (a row a warp).
    """
    return SimtAttentionConfig(head_dim, 8, 32, 128)


@functools.cache
def prefill_config(head_dim, row_tiles=1):
    """For training and prefill: 4 x 4 scores and up to 64 outputs a thread, if shared memory allows.

    row_tiles: as in shared_bytes; 2 for the gradient. 64 rows, 8 lanes, 128 threads; H200, forward as above but with
    loads one by one: 1.05x over 16 lanes and 256 threads, 1.30x over 32 rows, 1.21x over 128 rows and 256 threads.
    """
    limit = device.max_shared_bytes()
    for rows in (64, 32, 16):
        config = SimtAttentionConfig(head_dim, rows, 8, 128)
        if rows * head_dim <= 64 * 128 and config.shared_bytes(row_tiles) <= limit:
            return config
    return SimtAttentionConfig(head_dim, 8, 8, 64)


@functools.cache
def dot_products_function(config):
    """The device function for the dot products of a thread's rows with its keys, both in shared memory."""
    head_dim, _, lanes, _ = config
    rows_per_thread, keys_per_thread, stride = config.rows_per_thread, config.keys_per_thread, config.stride

    @device_function
    def dot_products(shared, rows, keys, result):
        """result[i, c] = row i . key c, each one fma chain over the columns.

        rows, keys: offsets in `shared` of the thread's first row and first key.
        """
        row_values = cuda.local.array(rows_per_thread, np.float32)
        key_values = cuda.local.array(keys_per_thread, np.float32)
        for i in range(rows_per_thread * keys_per_thread):
            result[i] = np.float32(0.0)
        for column in range(0, head_dim, UNROLL):
            for u in range(UNROLL):
                row_offset = ((rows + column) & OFFSET_MASK) + u
                key_offset = ((keys + column) & OFFSET_MASK) + u
                for i in range(rows_per_thread):
                    row_values[i] = shared[row_offset + i * stride]
                for c in range(keys_per_thread):
                    key_values[c] = shared[key_offset + c * lanes * stride]
                for i in range(rows_per_thread):
                    for c in range(keys_per_thread):
                        result[i * keys_per_thread + c] = cuda.fma(
                            row_values[i], key_values[c], result[i * keys_per_thread + c]
                        )

    return dot_products


@functools.cache
def accumulate_function(config):
    """The device function that adds the rows of a tile, weighted by the scores of a thread's rows."""
    lanes, rows_per_thread, columns, stride = config.lanes, config.rows_per_thread, config.columns, config.stride

    @device_function
    def accumulate(shared, weights, values, acc, sums):
        """acc[i, c] += sum over keys of weight[i, key] * value[key, c], one fma chain; sums[i] = sum of weights.

        weights, values: offsets in `shared` of the weights of the thread's first row and of its first column.
        """
        weight = cuda.local.array(rows_per_thread, np.float32)
        value = cuda.local.array(columns, np.float32)
        for i in range(rows_per_thread):
            sums[i] = np.float32(0.0)
        for key in range(0, TILE_KEYS, UNROLL):
            for u in range(UNROLL):
                weight_offset = ((weights + key) & OFFSET_MASK) + u
                value_offset = ((values + key * stride) & OFFSET_MASK) + u * stride
                for i in range(rows_per_thread):
                    weight[i] = shared[weight_offset + i * SCORE_STRIDE]
                    sums[i] += weight[i]
                for c in range(columns):
                    value[c] = shared[value_offset + c * lanes]
                for i in range(rows_per_thread):
                    for c in range(columns):
                        acc[i * columns + c] = cuda.fma(weight[i], value[c], acc[i * columns + c])

    return accumulate


@functools.cache
def load_rows_function(config, count):
    """The device function that loads `count` rows to shared memory as float32; a warp takes every n-th row."""
    head_dim, threads, stride = config.head_dim, config.threads, config.stride
    warps = threads // 32
    rows_per_warp = count // warps
    steps = -(-(stride - 1) // 32)
    # Larger heads leave fewer registers for loads in flight.
    loads = LOADS_IN_FLIGHT if head_dim <= 128 else LOADS_IN_FLIGHT // 2
    batch = max(n for n in range(1, steps + 1) if steps % n == 0 and (n * rows_per_warp <= loads or n == 1))
    staged_count = rows_per_warp * batch

    @device_function
    def load_rows(shared, offset, x, tokens, heads, valid_rows, scale):
        """Row i of the warp is x[tokens[i], heads[i]] * scale, written from `offset` on; zero beyond valid_rows."""
        staged = cuda.local.array(staged_count, np.float32)
        lane = cuda.threadIdx.x & 31
        warp = (cuda.threadIdx.x & (threads - 1)) // 32
        for step in range(0, steps, batch):
            # The loads are unconditional: beyond the row's end they take its last column.
            for s in range(batch):
                column = min(lane + (step + s) * 32, head_dim - 1)
                for i in range(rows_per_warp):
                    staged[s * rows_per_warp + i] = widen(x[tokens[i], heads[i], column]) * scale
            for s in range(batch):
                column = lane + (step + s) * 32
                if column < stride - 1:
                    for i in range(rows_per_warp):
                        row = warp + i * warps
                        value = staged[s * rows_per_warp + i]
                        if row >= valid_rows or column >= head_dim:
                            value = np.float32(0.0)
                        shared[offset + row * stride + column] = value

    return load_rows


@functools.cache
def row_indices_function(config, count):
    """The device function that finds the token and head of the warp's rows in a block or tile of `count` rows."""
    threads = config.threads
    warps = threads // 32
    rows_per_warp = count // warps

    @device_function
    def row_indices(seq_start, kv_head, gqa_ratio, first_row, valid_rows, tokens, heads):
        """Rows from first_row on of a KV head's matrix; beyond valid_rows, the last valid one.

        Row r is query token r // gqa_ratio of the sequence and query head r % gqa_ratio of the KV head.
        """
        warp = (cuda.threadIdx.x & (threads - 1)) // 32
        for i in range(rows_per_warp):
            index = first_row + min(warp + i * warps, valid_rows - 1)
            tokens[i] = seq_start + index // gqa_ratio
            heads[i] = kv_head * gqa_ratio + index % gqa_ratio

    return row_indices


@functools.cache
def store_rows_function(config):
    """The device function that writes a thread's accumulators to global memory, through shared memory."""
    head_dim, rows, lanes, threads = config
    rows_per_thread, columns, stride = config.rows_per_thread, config.columns, config.stride
    warp_rows = rows // (threads // 32)

    @device_function
    def store_rows(shared, offset, acc, factors, seq_start, kv_head, gqa_ratio, first_row, valid_rows, out):
        """Rows of `out` = the accumulators, row i times factors[i].

        offset: of an array of the block's rows in shared memory, of which only this warp still reads its own rows.
        """
        thread = cuda.threadIdx.x & (threads - 1)
        lane = thread % lanes
        thread_row = thread // lanes * rows_per_thread
        for i in range(rows_per_thread):
            for c in range(columns):
                shared[offset + (thread_row + i) * stride + lane + c * lanes] = acc[i * columns + c] * factors[i]
        sync_warp()
        for row in range(thread // 32 * warp_rows, min((thread // 32 + 1) * warp_rows, valid_rows)):
            index = first_row + row
            for column in range(thread % 32, head_dim, 32):
                out[seq_start + index // gqa_ratio, kv_head * gqa_ratio + index % gqa_ratio, column] = narrow(
                    shared[offset + row * stride + column], out
                )

    return store_rows


@functools.cache
def softmax_function(config):
    """The device function of an online softmax step over a thread's rows."""
    lanes, rows_per_thread, keys_per_thread = config.lanes, config.rows_per_thread, config.keys_per_thread

    @device_function
    def online_softmax_step(scores, first_position, first_key, gqa_ratio, row_max, rescale, shared, offset):
        """Mask the scores, update row_max, and write the probabilities to shared memory.

        first_position: row index of the thread's first row, counted from the context's first token; first_key: of the
        thread in the tile; rescale: the factor of what was summed before; offset: of the thread's first score.
        """
        for i in range(rows_per_thread):
            position = (first_position + i) // gqa_ratio
            new_max = row_max[i]
            for c in range(keys_per_thread):
                if first_key + c * lanes > position:
                    scores[i * keys_per_thread + c] = MINUS_INFINITY
                new_max = max(new_max, scores[i * keys_per_thread + c])
            distance = lanes // 2
            while distance > 0:
                new_max = max(new_max, shuffle_xor(new_max, distance))
                distance //= 2
            # A row that sees no key yet subtracts zero; -inf - -inf would be NaN.
            subtracted = new_max if new_max > MINUS_INFINITY else np.float32(0.0)
            for c in range(keys_per_thread):
                shared[offset + i * SCORE_STRIDE + c * lanes] = math.exp(scores[i * keys_per_thread + c] - subtracted)
            rescale[i] = math.exp(row_max[i] - subtracted)
            row_max[i] = new_max

    return online_softmax_step


@functools.cache
def attention_function(config, key_row):
    """The device function that computes the attention of one block of rows.

    key_row(table, block_size, sequence, key) is the row of k and v that holds a key of a sequence.
    """
    _, rows, lanes, threads = config
    rows_per_thread = config.rows_per_thread
    columns, stride = config.columns, config.stride
    warps = threads // 32
    warp_rows, warp_keys = rows // warps, TILE_KEYS // warps
    score_count, acc_count = rows_per_thread * config.keys_per_thread, rows_per_thread * columns
    # Shared memory in floats: rows of q, keys, values, then the scores of a tile.
    key_tile = rows * stride
    value_tile = key_tile + TILE_KEYS * stride
    score_tile = value_tile + TILE_KEYS * stride
    dot_products, accumulate = dot_products_function(config), accumulate_function(config)
    online_softmax_step, store_rows = softmax_function(config), store_rows_function(config)
    row_indices, load_queries = row_indices_function(config, rows), load_rows_function(config, rows)
    load_keys = load_rows_function(config, TILE_KEYS)

    @device_function
    def attend(q, k, v, table, block_size, seq_start, query_len, context_len, first_row, scale, out, row_max, row_sum):
        """A block owns `rows` rows of one KV head of one sequence, from first_row on.

        The queries are the rows seq_start .. seq_start + query_len of q, the last query_len of the sequence's
        context_len tokens. One pass over the keys: each tile of k and v is loaded to shared memory as float32, zero
        beyond the context. A thread owns rows_per_thread rows; of the scores its keys are lane, lane + lanes, ...; of
        the output its columns likewise. out is written, and row_max and row_sum, the maximum and the sum of a thread's
        rows.
        """
        shared = cuda.shared.array(0, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        acc = cuda.local.array(acc_count, np.float32)
        tile_sum = cuda.local.array(rows_per_thread, np.float32)
        rescale = cuda.local.array(rows_per_thread, np.float32)
        tokens = cuda.local.array(warp_rows, np.int64)
        heads = cuda.local.array(warp_rows, np.int64)
        key_rows = cuda.local.array(warp_keys, np.int64)
        key_heads = cuda.local.array(warp_keys, np.int64)
        # The mask shows the compiler that no index below is negative.
        thread = cuda.threadIdx.x & (threads - 1)
        lane = thread % lanes
        thread_row = thread // lanes * rows_per_thread
        sequence = cuda.blockIdx.z
        kv_head = cuda.blockIdx.y
        gqa_ratio = q.shape[1] // k.shape[1]
        valid_rows = min(query_len * gqa_ratio - first_row, rows)
        # A warp without a valid row computes nothing.
        warp_is_valid = thread // 32 * warp_rows < valid_rows
        query_offset = context_len - query_len

        row_indices(seq_start, kv_head, gqa_ratio, first_row, valid_rows, tokens, heads)
        load_queries(shared, 0, q, tokens, heads, valid_rows, scale)
        for i in range(rows_per_thread):
            row_max[i] = MINUS_INFINITY
            row_sum[i] = np.float32(0.0)
        for i in range(acc_count):
            acc[i] = np.float32(0.0)

        visible_keys = query_offset + (first_row + valid_rows - 1) // gqa_ratio + 1
        for tile_start in range(0, visible_keys, TILE_KEYS):
            cuda.syncthreads()
            for i in range(warp_keys):
                key = min(tile_start + thread // 32 + i * warps, context_len - 1)
                key_rows[i] = key_row(table, block_size, sequence, key)
                key_heads[i] = kv_head
            load_keys(shared, key_tile, k, key_rows, key_heads, context_len - tile_start, np.float32(1.0))
            load_keys(shared, value_tile, v, key_rows, key_heads, context_len - tile_start, np.float32(1.0))
            cuda.syncthreads()
            if not warp_is_valid:
                continue

            dot_products(shared, thread_row * stride, key_tile + lane * stride, scores)
            online_softmax_step(
                scores, query_offset * gqa_ratio + first_row + thread_row, tile_start + lane, gqa_ratio, row_max,
                rescale, shared, score_tile + thread_row * SCORE_STRIDE + lane,
            )  # fmt: skip
            for i in range(rows_per_thread):
                for c in range(columns):
                    acc[i * columns + c] *= rescale[i]
            # The scores of a row are written and read by the threads of one warp.
            sync_warp()
            accumulate(shared, score_tile + thread_row * SCORE_STRIDE, value_tile + lane, acc, tile_sum)
            for i in range(rows_per_thread):
                row_sum[i] = cuda.fma(row_sum[i], rescale[i], tile_sum[i])

        # Without keys there was no tile, and another warp may still be loading rows of q.
        cuda.syncthreads()
        if not warp_is_valid:
            return
        for i in range(rows_per_thread):
            # A row without keys (an empty context) gives zeros.
            rescale[i] = np.float32(1.0) / row_sum[i] if row_sum[i] != np.float32(0.0) else np.float32(0.0)
        store_rows(shared, 0, acc, rescale, seq_start, kv_head, gqa_ratio, first_row, valid_rows, out)

    return attend


@device_function
def packed_row(cu_seqlens, block_size, sequence, key):
    """The row of a key where the keys of a sequence are contiguous."""
    return cu_seqlens[sequence] + key


@specialize
def attention_kernel(config):
    """The kernel of attention_simt for a config."""
    rows, lanes, rows_per_thread = config.rows, config.lanes, config.rows_per_thread
    attend = attention_function(config, packed_row)

    @cuda.jit
    def attention_kernel(q, k, v, cu_seqlens, scale, out, lse):
        """A block owns `rows` rows of a KV head of a sequence; the last rows, which see the most keys, start first."""
        row_max = cuda.local.array(rows_per_thread, np.float32)
        row_sum = cuda.local.array(rows_per_thread, np.float32)
        start = cu_seqlens[cuda.blockIdx.z]
        length = cu_seqlens[cuda.blockIdx.z + 1] - start
        gqa_ratio = q.shape[1] // k.shape[1]
        first_row = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows
        if first_row >= length * gqa_ratio:
            return
        attend(q, k, v, cu_seqlens, 0, start, length, length, first_row, scale, out, row_max, row_sum)
        lane = cuda.threadIdx.x % lanes
        for i in range(rows_per_thread):
            index = first_row + cuda.threadIdx.x // lanes * rows_per_thread + i
            if lane == 0 and index < length * gqa_ratio:
                head = cuda.blockIdx.y * gqa_ratio + index % gqa_ratio
                lse[head, start + index // gqa_ratio] = row_max[i] + math.log(row_sum[i])

    return attention_kernel


def attention_simt(q, k, v, cu_seqlens, max_seqlen, scale, out, lse):
    """As the operator attention, which has checked the arguments."""
    _, heads, head_dim = q.shape
    kv_heads, config = k.shape[1], prefill_config(head_dim)
    grid = (-(-max_seqlen * (heads // kv_heads) // config.rows), kv_heads, len(cu_seqlens) - 1)
    launch(
        attention_kernel(config), grid, config.threads,
        q, k, v, cu_seqlens, float(scale), out, lse,
        shared=config.shared_bytes(),
    )  # fmt: skip
