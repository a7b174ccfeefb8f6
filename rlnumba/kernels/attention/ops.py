"""Causal attention over packed sequences with grouped query heads (Dao et al., 2022: online softmax).

    s[i, j] = scale * q[i] . k[j]  for j <= i      lse[i] = log sum_j exp(s[i, j])
    out[i] = sum_j exp(s[i, j] - lse[i]) * v[j]

q, out (N, H, E); k, v (N, HK, E) in float32, float16 or bfloat16; lse (H, N) float32. H is a multiple of
HK: query head h reads key head h // (H / HK). Sequence b owns the rows cu_seqlens[b] .. cu_seqlens[b + 1].

Three families of kernels compute it (runtime/dispatch.py says which on which GPU): attention/sm90_forward.py,
attention/sm80_forward.py, and the simple ones of this module. Their arithmetic differs, within rounding. The
simple ones compute in float32 throughout. What a row computes, in this order, wherever it stands in whatever batch:

    for each tile of KEYS keys, the tiles fixed by the keys' absolute positions:
        s_j = fma chain over e of (scale * q_e) * k_je          for each key j of the tile; -inf beyond the row
        new = max(m, max_j s_j)      shrink = exp(m - new)      p_j = exp(s_j - new)      m = new
        l = fma(l, shrink, p_0 + p_1 + ...)                     in the order of the keys
        acc_e = fma chain over j of p_j * v_je, starting from acc_e * shrink
    out_e = acc_e * (1 / l)      lse = m + log(l)

Only the maximum is taken across threads, and it is exact in any order. So the bits of a row depend neither
on the shape of a block, nor on the other rows of it, nor on where a key is stored: paged_attention runs the
same `attend` and gets the same bits. Keys beyond a row change nothing: p = 0 and shrink = 1.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention import cpu as attention_cpu
from rlnumba.kernels.attention import sm80_forward, sm90_forward
from rlnumba.kernels.checks import F32, FLOATS, check, check_bounds, check_chunks
from rlnumba.kernels.ptx.warp import device_function, narrow, shuffle_xor, sync_warp, widen
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Keys of a tile. Part of the arithmetic: the running maximum moves at the borders of the tiles.
KEYS = 32
# Floats from one row of scores to the next in shared memory; odd, as Tile.stride.
SCORE_STRIDE = KEYS + 1
MAX_HEAD_DIM = 256
# Columns or keys that the inner loops take at once; rows in shared memory are padded with zeros to it.
UNROLL = 4
# Global loads that a thread may have under way at once: on an H200 (64 x 640 tokens, 16 and 8 heads of 128, bfloat16)
# 8, 16, 32 give forward 13.5, 13.7, 17.1 TFLOP/s and decode of 64 x 512 tokens 697, 519, 1128 GB/s of keys and values.
LOADS = 32
# All indices of shared memory fit in these bits. The mask spares the inner loops a test for negative indices.
SHARED = 0xFFFF
MINUS_INFINITY = np.float32(-np.inf)


class Tile(NamedTuple):
    """How a block is cut: `lanes` neighbouring threads of a warp share rows * lanes / threads of its rows."""

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
        return KEYS // self.lanes

    @property
    def columns(self):
        """Columns of a row that a thread sums up: lane, lane + lanes, ..."""
        return -(-self.head_dim // self.lanes)

    @property
    def stride(self):
        """Floats from one row to the next in shared memory: odd, so that a column touches all banks."""
        return self.columns * self.lanes + 1

    def shared_bytes(self, copies=1):
        """For `copies` arrays of the block's rows, two of KEYS rows, the scores and two numbers a key."""
        return 4 * (self.stride * (copies * self.rows + 2 * KEYS) + self.rows * SCORE_STRIDE + 2 * KEYS)


def few_rows(head_dim):
    """The tile for decode: a warp owns two rows, so that the rows that share a key head spread over warps.

    8 rows, 32 lanes; H200, 64 x 512 tokens, 16 and 8 heads of 128: 1.35x over 256 threads (a row a warp).
    """
    return Tile(head_dim, 8, 32, 128)


@functools.cache
def many_rows(head_dim, copies=1):
    """The tile for training and prefill: 4 x 4 scores and up to 64 outputs a thread, if shared memory allows.

    64 rows, 8 lanes, 128 threads; H200, forward as above but with loads one by one: 1.05x over 16 lanes and 256
    threads, 1.30x over 32 rows, 1.21x over 128 rows and 256 threads.
    """
    limit = 227 * 1024
    if device.name() == "cuda":
        limit = device.xp().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    for rows in (64, 32, 16):
        tile = Tile(head_dim, rows, 8, 128)
        if rows * head_dim <= 64 * 128 and tile.shared_bytes(copies) <= limit:
            return tile
    return Tile(head_dim, 8, 8, 64)


@functools.cache
def products_function(tile):
    """The device function that multiplies a thread's rows by its keys, both in shared memory."""
    head_dim, _, lanes, _ = tile
    rows_per_thread, keys_per_thread, stride = tile.rows_per_thread, tile.keys_per_thread, tile.stride

    @device_function
    def products(shared, rows, keys, result):
        """result[i, c] = row i . key c, each one fma chain over the columns.

        rows, keys: where in `shared` the thread's first row and first key begin.
        """
        row_part = cuda.local.array(rows_per_thread, np.float32)
        key_part = cuda.local.array(keys_per_thread, np.float32)
        for i in range(rows_per_thread * keys_per_thread):
            result[i] = np.float32(0.0)
        for column in range(0, head_dim, UNROLL):
            for part in range(UNROLL):
                at_row = ((rows + column) & SHARED) + part
                at_key = ((keys + column) & SHARED) + part
                for i in range(rows_per_thread):
                    row_part[i] = shared[at_row + i * stride]
                for c in range(keys_per_thread):
                    key_part[c] = shared[at_key + c * lanes * stride]
                for i in range(rows_per_thread):
                    for c in range(keys_per_thread):
                        result[i * keys_per_thread + c] = cuda.fma(
                            row_part[i], key_part[c], result[i * keys_per_thread + c]
                        )

    return products


@functools.cache
def accumulate_function(tile):
    """The device function that adds the rows of a tile, weighted by the scores of a thread's rows."""
    lanes, rows_per_thread, columns, stride = tile.lanes, tile.rows_per_thread, tile.columns, tile.stride

    @device_function
    def accumulate(shared, weights, values, acc, sums):
        """acc[i, c] += sum over keys of weight[i, key] * value[key, c], one fma chain; sums[i] = sum of weights.

        weights, values: where in `shared` the weights of the thread's first row and its first column begin.
        """
        weight = cuda.local.array(rows_per_thread, np.float32)
        value = cuda.local.array(columns, np.float32)
        for i in range(rows_per_thread):
            sums[i] = np.float32(0.0)
        for key in range(0, KEYS, UNROLL):
            for part in range(UNROLL):
                at_weight = ((weights + key) & SHARED) + part
                at_value = ((values + key * stride) & SHARED) + part * stride
                for i in range(rows_per_thread):
                    weight[i] = shared[at_weight + i * SCORE_STRIDE]
                    sums[i] += weight[i]
                for c in range(columns):
                    value[c] = shared[at_value + c * lanes]
                for i in range(rows_per_thread):
                    for c in range(columns):
                        acc[i * columns + c] = cuda.fma(weight[i], value[c], acc[i * columns + c])

    return accumulate


@functools.cache
def load_function(tile, count):
    """The device function that stages `count` rows in shared memory as float32; a warp takes every n-th row."""
    head_dim, threads, stride = tile.head_dim, tile.threads, tile.stride
    warps = threads // 32
    rows_per_warp = count // warps
    steps = -(-(stride - 1) // 32)
    # Larger heads leave fewer registers for values on their way.
    loads = LOADS if head_dim <= 128 else LOADS // 2
    group = max(n for n in range(1, steps + 1) if steps % n == 0 and (n * rows_per_warp <= loads or n == 1))
    staged_count = rows_per_warp * group

    @device_function
    def load(shared, place, x, tokens, heads, alive, scale):
        """Row i of the warp is x[tokens[i], heads[i]] * scale; goes to `place`; zero from the tile's row `alive` on."""
        staged = cuda.local.array(staged_count, np.float32)
        lane = cuda.threadIdx.x & 31
        warp = (cuda.threadIdx.x & (threads - 1)) // 32
        for step in range(0, steps, group):
            # The loads know no condition: beyond the row's end they take its last column.
            for s in range(group):
                column = min(lane + (step + s) * 32, head_dim - 1)
                for i in range(rows_per_warp):
                    staged[s * rows_per_warp + i] = widen(x[tokens[i], heads[i], column]) * scale
            for s in range(group):
                column = lane + (step + s) * 32
                if column < stride - 1:
                    for i in range(rows_per_warp):
                        row = warp + i * warps
                        value = staged[s * rows_per_warp + i]
                        if row >= alive or column >= head_dim:
                            value = np.float32(0.0)
                        shared[place + row * stride + column] = value

    return load


@functools.cache
def query_rows_function(tile, count):
    """The device function that tells which rows of q the warp's rows of a block or tile of `count` rows are."""
    threads = tile.threads
    warps = threads // 32
    rows_per_warp = count // warps

    @device_function
    def query_rows(start, kv_head, group, first, alive, tokens, heads):
        """Rows from `first` on of a key head of the sequence at `start`; beyond `alive` rows, the last of them."""
        warp = (cuda.threadIdx.x & (threads - 1)) // 32
        for i in range(rows_per_warp):
            index = first + min(warp + i * warps, alive - 1)
            tokens[i] = start + index // group
            heads[i] = kv_head * group + index % group

    return query_rows


@functools.cache
def attend_function(tile, key_row):
    """The device function that computes one block of attention, for a tile and a place of the keys.

    key_row(table, block_size, sequence, key) is the row of k and v that holds a key of a sequence.
    """
    head_dim, rows, lanes, threads = tile
    rows_per_thread, keys_per_thread = tile.rows_per_thread, tile.keys_per_thread
    columns, stride = tile.columns, tile.stride
    warps = threads // 32
    warp_rows = rows // warps
    warp_keys = KEYS // warps
    score_count, acc_count = rows_per_thread * keys_per_thread, rows_per_thread * columns
    # Shared memory in floats: rows of q, keys, values, then the scores of a tile.
    key_tile = rows * stride
    value_tile = key_tile + KEYS * stride
    score_tile = value_tile + KEYS * stride
    products, accumulate = products_function(tile), accumulate_function(tile)
    query_rows, load_queries, load_keys = (
        query_rows_function(tile, rows),
        load_function(tile, rows),
        load_function(tile, KEYS),
    )

    @device_function
    def attend(q, k, v, table, block_size, start, length, context, first, scale, out, row_max, row_sum):
        """A block owns `rows` rows of one key head of one sequence, from row `first` on.

        Row r is query token r // G of the sequence and the key head's query head r % G, G = H / HK. The
        queries are the rows start .. start + length of q, the last `length` of the sequence's `context`
        tokens. One pass over the keys: each tile of k and v is staged in shared memory as float32, zero
        beyond the context. A thread owns rows_per_thread rows; of the scores its keys are lane, lane +
        lanes, ...; of the output its columns likewise. out is written, and row_max and row_sum, the
        maximum and the sum of a thread's rows.
        """
        shared = cuda.shared.array(0, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        acc = cuda.local.array(acc_count, np.float32)
        tile_sum = cuda.local.array(rows_per_thread, np.float32)
        shrink = cuda.local.array(rows_per_thread, np.float32)
        tokens = cuda.local.array(warp_rows, np.int64)
        heads = cuda.local.array(warp_rows, np.int64)
        key_places = cuda.local.array(warp_keys, np.int64)
        key_heads = cuda.local.array(warp_keys, np.int64)
        # The mask tells the compiler that no index below is negative.
        thread = cuda.threadIdx.x & (threads - 1)
        lane = thread % lanes
        own_row = thread // lanes * rows_per_thread
        sequence = cuda.blockIdx.z
        kv_head = cuda.blockIdx.y
        group = q.shape[1] // k.shape[1]
        alive = min(length * group - first, rows)
        # Rows beyond the end compute nothing where a whole warp has none but such.
        warp_alive = thread // 32 * warp_rows < alive
        before = context - length

        query_rows(start, kv_head, group, first, alive, tokens, heads)
        load_queries(shared, 0, q, tokens, heads, alive, scale)
        for i in range(rows_per_thread):
            row_max[i] = MINUS_INFINITY
            row_sum[i] = np.float32(0.0)
        for i in range(acc_count):
            acc[i] = np.float32(0.0)

        visible = before + (first + alive - 1) // group + 1
        for tile_start in range(0, visible, KEYS):
            cuda.syncthreads()
            for i in range(warp_keys):
                key = min(tile_start + thread // 32 + i * warps, context - 1)
                key_places[i] = key_row(table, block_size, sequence, key)
                key_heads[i] = kv_head
            load_keys(shared, key_tile, k, key_places, key_heads, context - tile_start, np.float32(1.0))
            load_keys(shared, value_tile, v, key_places, key_heads, context - tile_start, np.float32(1.0))
            cuda.syncthreads()
            if not warp_alive:
                continue

            products(shared, own_row * stride, key_tile + lane * stride, scores)
            for i in range(rows_per_thread):
                position = before + (first + own_row + i) // group
                largest = row_max[i]
                for c in range(keys_per_thread):
                    if tile_start + lane + c * lanes > position:
                        scores[i * keys_per_thread + c] = MINUS_INFINITY
                    largest = max(largest, scores[i * keys_per_thread + c])
                distance = lanes // 2
                while distance > 0:
                    largest = max(largest, shuffle_xor(largest, distance))
                    distance //= 2
                # A row that sees no key yet has nothing to subtract; -inf - -inf would be NaN.
                reference = largest if largest > MINUS_INFINITY else np.float32(0.0)
                for c in range(keys_per_thread):
                    shared[score_tile + (own_row + i) * SCORE_STRIDE + lane + c * lanes] = math.exp(
                        scores[i * keys_per_thread + c] - reference
                    )
                shrink[i] = math.exp(row_max[i] - reference)
                row_max[i] = largest
            for i in range(rows_per_thread):
                for c in range(columns):
                    acc[i * columns + c] *= shrink[i]
            # The scores of a row are written and read by the threads of one warp.
            sync_warp()
            accumulate(shared, score_tile + own_row * SCORE_STRIDE, value_tile + lane, acc, tile_sum)
            for i in range(rows_per_thread):
                row_sum[i] = cuda.fma(row_sum[i], shrink[i], tile_sum[i])

        # Without keys there was no tile, and another warp may still be loading rows of q.
        cuda.syncthreads()
        if not warp_alive:
            return
        for i in range(rows_per_thread):
            # A row without keys (an empty context) gives zeros.
            inverse = np.float32(1.0) / row_sum[i] if row_sum[i] != np.float32(0.0) else np.float32(0.0)
            for c in range(columns):
                shared[(own_row + i) * stride + lane + c * lanes] = acc[i * columns + c] * inverse
        # A warp's rows of q are read by itself only; their place now holds its rows of out.
        sync_warp()
        for row in range(thread // 32 * warp_rows, min((thread // 32 + 1) * warp_rows, alive)):
            index = first + row
            for column in range(thread % 32, head_dim, 32):
                out[start + index // group, kv_head * group + index % group, column] = narrow(
                    shared[row * stride + column], out
                )

    return attend


@device_function
def packed_row(cu_seqlens, block_size, sequence, key):
    """The row of a key where the keys of a sequence lie one after the other."""
    return cu_seqlens[sequence] + key


@specialize
def attention_kernel(tile):
    """The kernel of `attention` for a tile."""
    rows, lanes, rows_per_thread = tile.rows, tile.lanes, tile.rows_per_thread
    attend = attend_function(tile, packed_row)

    @cuda.jit
    def attention_kernel(q, k, v, cu_seqlens, scale, out, lse):
        """A block owns `rows` rows of a key head of a sequence (see attend); the last rows, which see the
        most keys, start first."""
        row_max = cuda.local.array(rows_per_thread, np.float32)
        row_sum = cuda.local.array(rows_per_thread, np.float32)
        start = cu_seqlens[cuda.blockIdx.z]
        length = cu_seqlens[cuda.blockIdx.z + 1] - start
        group = q.shape[1] // k.shape[1]
        first = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows
        if first >= length * group:
            return
        attend(q, k, v, cu_seqlens, 0, start, length, length, first, scale, out, row_max, row_sum)
        lane = cuda.threadIdx.x % lanes
        for i in range(rows_per_thread):
            index = first + cuda.threadIdx.x // lanes * rows_per_thread + i
            if lane == 0 and index < length * group:
                lse[cuda.blockIdx.y * group + index % group, start + index // group] = row_max[i] + math.log(row_sum[i])

    return attention_kernel


TAKES = {"sm90": sm90_forward.is_supported, "sm80": sm80_forward.takes}


def family_of(q, k):
    """The family of kernels that computes attention of such heads: "sm90", "sm80" or "simt".

    It follows from the GPU and from what all layers and all calls of a model have in common: the dtype, head_dim and
    the query heads of a key head. So packed and paged attention and the gradient cannot differ in it.
    """
    return family_for(q.dtype.name, q.shape[2], q.shape[1] // k.shape[1])


def family_for(element, head_dim, group):
    """As family_of; element: the dtype's name, group: query heads of a key head."""
    family = dispatch.family("attention")
    takes = TAKES.get(family)
    return family if takes and takes(element, head_dim, group) else "simt"


def check_heads(op, q, k, v, scale):
    """(N, H, HK, E) of q (N, H, E) and of k and v (rows, HK, E), or ValueError."""
    tokens, heads, head_dim = check(op, "q", q, (None, None, None), FLOATS)
    rows, kv_heads, _ = check(op, "k", k, (None, None, head_dim), (q.dtype,))
    check(op, "v", v, (rows, kv_heads, head_dim), (q.dtype,))
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{op}: the number of query heads must be a multiple of {kv_heads} key heads, got {heads}")
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{op}: head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}")
    if not scale > 0:
        raise ValueError(f"{op}: scale must be > 0, got {scale}")
    return tokens, heads, kv_heads, head_dim


def attention(q, k, v, cu_seqlens, max_seqlen, scale, out, lse):
    """Causal attention of packed sequences with grouped query heads.

    q (N, H, E), k and v (N, HK, E) of one floating dtype, H a multiple of HK, E even and at most 256; scale > 0;
    cu_seqlens (B + 1,) int32 from 0 to N; max_seqlen: at least the longest sequence's length (not checked:
    that would wait for the device; queries beyond it are not computed). out (N, H, E) of q's dtype and lse
    (H, N) float32, the log-sum-exp of a row's scaled scores, are written. Raises ValueError for other
    shapes, dtypes or layouts. Source: Dao et al. 2022, algorithm 1.
    """
    tokens, heads, kv_heads, head_dim = check_heads("attention", q, k, v, scale)
    check("attention", "k", k, (tokens, kv_heads, head_dim), (q.dtype,))
    sequences = check_bounds("attention", "cu_seqlens", cu_seqlens)
    check("attention", "out", out, q.shape, (q.dtype,))
    check("attention", "lse", lse, (heads, tokens), F32)
    if device.name() == "cpu":
        attention_cpu.attention(q, k, v, cu_seqlens, max_seqlen, scale, out, lse)
        return
    family = family_of(q, k)
    if family != "simt":
        check_chunks("attention", q=q, k=k, v=v, out=out)
        attend = sm90_forward.attention_sm90 if family == "sm90" else sm80_forward.attend
        attend(q, k, v, cu_seqlens, max_seqlen, scale, out, lse)
        return
    tile = many_rows(head_dim)
    grid = (-(-max_seqlen * (heads // kv_heads) // tile.rows), kv_heads, sequences)
    launch(
        attention_kernel(tile), grid, tile.threads,
        q, k, v, cu_seqlens, float(scale), out, lse,
        shared=tile.shared_bytes(),
    )  # fmt: skip


def attention_ref(q, k, v, cu_seqlens, scale):
    """(out, lse) of attention in float64, one sequence and one head at a time."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.zeros((q.shape[1], q.shape[0]))
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        hidden = np.triu(np.full((end - start, end - start), -np.inf), 1)
        for h in range(q.shape[1]):
            key_head = h * k.shape[1] // q.shape[1]
            s = scale * q[start:end, h] @ k[start:end, key_head].T + hidden
            lse[h, start:end] = np.logaddexp.reduce(s, axis=1)
            out[start:end, h] = np.exp(s - lse[h, start:end, None]) @ v[start:end, key_head]
    return out, lse
