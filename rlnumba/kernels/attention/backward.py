"""The gradient of causal packed attention (Dao et al., 2022, algorithm 4), without float atomics.

    p[i, j] = exp(s[i, j] - lse[i])      delta[i] = dout[i] . out[i]
    ds[i, j] = p[i, j] * (dout[i] . v[j] - delta[i])
    dq[i] = scale * sum_j ds[i, j] * k[j]
    dk[j] = scale * sum_i ds[i, j] * q[i]      dv[j] = sum_i p[i, j] * dout[i]

Shapes and dtypes as in kernels/attention/ops.py; with grouped heads, the sums over i run over all query heads of
a key head. p is computed again from q, k and lse, by the family of kernels that the forward took. The simple
ones, here, compute in float32 throughout: delta; dq, whose blocks own query rows and pass over the keys; dk and
dv, whose blocks own keys and pass over the query rows. Each sum is taken by one thread in the order of the keys
or rows, so equal inputs give equal bits, whatever the family.
"""

import math

import numpy as np

from rlnumba.kernels.attention import cpu as attention_cpu
from rlnumba.kernels.attention.delta import attention_delta
from rlnumba.kernels.attention.ops import (
    KEYS,
    SCORE_STRIDE,
    accumulate_function,
    check_heads,
    family_of,
    load_function,
    many_rows,
    products_function,
    query_rows_function,
)
from rlnumba.kernels.attention.sm80_backward import attend_backward
from rlnumba.kernels.attention.sm90_backward import sm90_attention_backward
from rlnumba.kernels.checks import F32, check, check_bounds, check_chunks
from rlnumba.kernels.ptx.warp import narrow, sync_warp
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize


@specialize
def attention_dq_kernel(tile):
    """The kernel of dq for a tile."""
    head_dim, rows, lanes, threads = tile
    rows_per_thread, keys_per_thread = tile.rows_per_thread, tile.keys_per_thread
    columns, stride = tile.columns, tile.stride
    warp_rows = rows // (threads // 32)
    score_count, acc_count = rows_per_thread * keys_per_thread, rows_per_thread * columns
    # Shared memory in floats: rows of q and dout, keys, values, then ds of a tile.
    dout_tile = rows * stride
    key_tile = dout_tile + rows * stride
    value_tile = key_tile + KEYS * stride
    score_tile = value_tile + KEYS * stride
    products, accumulate = products_function(tile), accumulate_function(tile)
    warp_tile_rows = KEYS // (threads // 32)
    block_place, load_block = query_rows_function(tile, rows), load_function(tile, rows)
    tile_place, load_tile = query_rows_function(tile, KEYS), load_function(tile, KEYS)

    @cuda.jit
    def attention_dq_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dq):
        """A block owns `rows` rows of a key head of a sequence, as in attention; one pass over their keys."""
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
        own_row = thread // lanes * rows_per_thread
        kv_head = cuda.blockIdx.y
        start = cu_seqlens[cuda.blockIdx.z]
        length = cu_seqlens[cuda.blockIdx.z + 1] - start
        group = q.shape[1] // k.shape[1]
        first = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows
        alive = min(length * group - first, rows)
        if alive <= 0:
            return
        warp_alive = thread // 32 * warp_rows < alive

        block_place(start, kv_head, group, first, alive, tokens, heads)
        load_block(shared, 0, q, tokens, heads, alive, scale)
        load_block(shared, dout_tile, dout, tokens, heads, alive, np.float32(1.0))
        for i in range(rows_per_thread):
            row_lse[i] = np.float32(0.0)
            row_delta[i] = np.float32(0.0)
            if own_row + i < alive:
                index = first + own_row + i
                row_lse[i] = lse[kv_head * group + index % group, start + index // group]
                row_delta[i] = delta[kv_head * group + index % group, start + index // group]
        for i in range(acc_count):
            acc[i] = np.float32(0.0)

        for tile_start in range(0, (first + alive - 1) // group + 1, KEYS):
            tile_keys = min(length - tile_start, KEYS)
            cuda.syncthreads()
            tile_place(start, kv_head, 1, tile_start, tile_keys, tile_tokens, tile_heads)
            load_tile(shared, key_tile, k, tile_tokens, tile_heads, tile_keys, np.float32(1.0))
            load_tile(shared, value_tile, v, tile_tokens, tile_heads, tile_keys, np.float32(1.0))
            cuda.syncthreads()
            if not warp_alive:
                continue
            products(shared, own_row * stride, key_tile + lane * stride, scores)
            products(shared, dout_tile + own_row * stride, value_tile + lane * stride, gradients)
            for i in range(rows_per_thread):
                position = (first + own_row + i) // group
                for c in range(keys_per_thread):
                    value = np.float32(0.0)
                    if tile_start + lane + c * lanes <= position:
                        p = math.exp(scores[i * keys_per_thread + c] - row_lse[i])
                        value = p * (gradients[i * keys_per_thread + c] - row_delta[i])
                    shared[score_tile + (own_row + i) * SCORE_STRIDE + lane + c * lanes] = value
            sync_warp()
            accumulate(shared, score_tile + own_row * SCORE_STRIDE, key_tile + lane, acc, sums)

        if not warp_alive:
            return
        for i in range(rows_per_thread):
            for c in range(columns):
                shared[(own_row + i) * stride + lane + c * lanes] = acc[i * columns + c] * scale
        sync_warp()
        for row in range(thread // 32 * warp_rows, min((thread // 32 + 1) * warp_rows, alive)):
            index = first + row
            for column in range(thread % 32, head_dim, 32):
                dq[start + index // group, kv_head * group + index % group, column] = narrow(
                    shared[row * stride + column], dq
                )

    return attention_dq_kernel


@specialize
def attention_dkv_kernel(tile):
    """The kernel of dk and dv for a tile, whose rows are keys here and whose KEYS are query rows."""
    head_dim, rows, lanes, threads = tile
    rows_per_thread, keys_per_thread = tile.rows_per_thread, tile.keys_per_thread
    columns, stride = tile.columns, tile.stride
    warp_rows = rows // (threads // 32)
    score_count, acc_count = rows_per_thread * keys_per_thread, rows_per_thread * columns
    # Shared memory in floats: the block's keys and values, rows of q and dout, p or ds, lse and delta of the rows.
    value_tile = rows * stride
    query_tile = value_tile + rows * stride
    dout_tile = query_tile + KEYS * stride
    score_tile = dout_tile + KEYS * stride
    lse_tile = score_tile + rows * SCORE_STRIDE
    delta_tile = lse_tile + KEYS
    products, accumulate = products_function(tile), accumulate_function(tile)
    warp_tile_rows = KEYS // (threads // 32)
    block_place, load_block = query_rows_function(tile, rows), load_function(tile, rows)
    tile_place, load_tile = query_rows_function(tile, KEYS), load_function(tile, KEYS)

    @cuda.jit
    def attention_dkv_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dk, dv):
        """A block owns `rows` keys of a key head of a sequence; one pass over the query rows that see them.

        A query row is a token and one of the key head's query heads, as in attention. A thread owns
        rows_per_thread keys; of p and ds its rows are lane, lane + lanes, ...; of dk and dv its columns likewise.
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
        own_key = thread // lanes * rows_per_thread
        kv_head = cuda.blockIdx.y
        start = cu_seqlens[cuda.blockIdx.z]
        length = cu_seqlens[cuda.blockIdx.z + 1] - start
        group = q.shape[1] // k.shape[1]
        first = cuda.blockIdx.x * rows
        alive = min(length - first, rows)
        if alive <= 0:
            return
        warp_alive = thread // 32 * warp_rows < alive

        block_place(start, kv_head, 1, first, alive, tokens, heads)
        load_block(shared, 0, k, tokens, heads, alive, np.float32(1.0))
        load_block(shared, value_tile, v, tokens, heads, alive, np.float32(1.0))
        for i in range(acc_count):
            dk_acc[i] = np.float32(0.0)
            dv_acc[i] = np.float32(0.0)

        for tile_start in range(first * group // KEYS * KEYS, length * group, KEYS):
            tile_rows = min(length * group - tile_start, KEYS)
            cuda.syncthreads()
            tile_place(start, kv_head, group, tile_start, tile_rows, tile_tokens, tile_heads)
            load_tile(shared, query_tile, q, tile_tokens, tile_heads, tile_rows, scale)
            load_tile(shared, dout_tile, dout, tile_tokens, tile_heads, tile_rows, np.float32(1.0))
            if thread < KEYS:
                index = tile_start + min(thread, tile_rows - 1)
                shared[lse_tile + thread] = lse[kv_head * group + index % group, start + index // group]
                shared[delta_tile + thread] = delta[kv_head * group + index % group, start + index // group]
            cuda.syncthreads()
            if not warp_alive:
                continue
            products(shared, own_key * stride, query_tile + lane * stride, scores)
            products(shared, value_tile + own_key * stride, dout_tile + lane * stride, gradients)
            for i in range(rows_per_thread):
                for c in range(keys_per_thread):
                    row = lane + c * lanes
                    p = np.float32(0.0)
                    if row < tile_rows and first + own_key + i <= (tile_start + row) // group:
                        p = np.float32(math.exp(scores[i * keys_per_thread + c] - shared[lse_tile + row]))
                    shared[score_tile + (own_key + i) * SCORE_STRIDE + row] = p
                    gradients[i * keys_per_thread + c] = p * (
                        gradients[i * keys_per_thread + c] - shared[delta_tile + row]
                    )
            # p, then ds, of a key are written and read by the threads of one warp.
            sync_warp()
            accumulate(shared, score_tile + own_key * SCORE_STRIDE, dout_tile + lane, dv_acc, sums)
            sync_warp()
            for i in range(rows_per_thread):
                for c in range(keys_per_thread):
                    shared[score_tile + (own_key + i) * SCORE_STRIDE + lane + c * lanes] = gradients[
                        i * keys_per_thread + c
                    ]
            sync_warp()
            accumulate(shared, score_tile + own_key * SCORE_STRIDE, query_tile + lane, dk_acc, sums)

        if not warp_alive:
            return
        for i in range(rows_per_thread):
            for c in range(columns):
                shared[(own_key + i) * stride + lane + c * lanes] = dk_acc[i * columns + c]
        for i in range(rows_per_thread):
            for c in range(columns):
                shared[value_tile + (own_key + i) * stride + lane + c * lanes] = dv_acc[i * columns + c]
        sync_warp()
        for row in range(thread // 32 * warp_rows, min((thread // 32 + 1) * warp_rows, alive)):
            for column in range(thread % 32, head_dim, 32):
                dk[start + first + row, kv_head, column] = narrow(shared[row * stride + column], dk)
                dv[start + first + row, kv_head, column] = narrow(shared[value_tile + row * stride + column], dv)

    return attention_dkv_kernel


def attention_backward(dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv):
    """The gradient of `attention` with respect to q, k and v; the same bits for the same arguments.

    dout, q, out, dq (N, H, E) and k, v, dk, dv (N, HK, E) of one floating dtype; lse (H, N) float32 and out
    as attention wrote them; cu_seqlens (B + 1,) int32 and max_seqlen as there. dq, dk and dv are written.
    Raises ValueError for other shapes, dtypes or layouts. Source: Dao et al. 2022, algorithm 4.
    """
    op = "attention_backward"
    tokens, heads, kv_heads, head_dim = check_heads(op, q, k, v, scale)
    for name, array in (("dout", dout), ("out", out), ("dq", dq)):
        check(op, name, array, q.shape, (q.dtype,))
    for name, array in (("k", k), ("dk", dk), ("dv", dv)):
        check(op, name, array, (tokens, kv_heads, head_dim), (q.dtype,))
    check(op, "lse", lse, (heads, tokens), F32)
    sequences = check_bounds(op, "cu_seqlens", cu_seqlens)
    if device.name() == "cpu":
        attention_cpu.attention_backward(dout, q, k, v, out, lse, cu_seqlens, scale, dq, dk, dv)
        return
    family = family_of(q, k)
    if family != "simt":
        check_chunks(op, dout=dout, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv)
        function = sm90_attention_backward if family == "sm90" else attend_backward
        function(dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv)
        return
    tile = many_rows(head_dim, copies=2)
    shared = tile.shared_bytes(copies=2)
    arguments = (dout, q, k, v, lse, attention_delta(dout, out), cu_seqlens, float(scale))
    grid = (-(-max_seqlen * (heads // kv_heads) // tile.rows), kv_heads, sequences)
    launch(attention_dq_kernel(tile), grid, tile.threads, *arguments, dq, shared=shared)
    grid = (-(-max_seqlen // tile.rows), kv_heads, sequences)
    launch(attention_dkv_kernel(tile), grid, tile.threads, *arguments, dk, dv, shared=shared)


def attention_backward_ref(dout, q, k, v, cu_seqlens, scale):
    """(dq, dk, dv) of attention in float64, one sequence and one head at a time."""
    dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        rows = slice(start, end)
        for h in range(q.shape[1]):
            key_head = h * k.shape[1] // q.shape[1]
            p = np.tril(np.exp(scale * q[rows, h] @ k[rows, key_head].T))
            p /= p.sum(axis=1, keepdims=True)
            dp = dout[rows, h] @ v[rows, key_head].T
            ds = p * (dp - np.sum(p * dp, axis=1, keepdims=True))
            dq[rows, h] = scale * ds @ k[rows, key_head]
            dk[rows, key_head] += scale * ds.T @ q[rows, h]
            dv[rows, key_head] += p.T @ dout[rows, h]
    return dq, dk, dv
