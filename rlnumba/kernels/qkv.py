"""From the fused projection to rotated q, k and v: split, RMSNorm of each head (Qwen3), rotary embedding.

A row of qkv holds H query heads, HK key heads and HK value heads of E values each. For a query or key head x,

    rstd = 1 / sqrt(mean(x^2) + eps)        x^ = x * rstd        y = x^ * weight        out = rope(y)

and for a value head out = x. Without norm weights y = x. Backward, with g = rope^-1(dout), u = g * weight:

    dx = rstd * (u - x^ * mean(u * x^))     dweight = sum over rows and heads of g * x^

qkv, q, k, v in float32, float16 or bfloat16; arithmetic float32, one rounding at the end; rstd (N, H + HK)
and dweight (E,) float32. A head's sum is taken by one warp in one order: 32 lanes, each over its pairs
(e, e + E/2), then a butterfly.
"""

import math

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels import qkv_cpu
from rlnumba.kernels.check import F32, FLOATS, I32, check
from rlnumba.kernels.instructions import device_function, narrow, warp_sum, widen
from rlnumba.kernels.launch import launch
from rlnumba.kernels.reduce import column_sum
from rlnumba.kernels.rmsnorm import rmsnorm_backward_ref, rmsnorm_ref
from rlnumba.kernels.rope import check_tables, rope_ref

# Heads of a token that a block works on at a time: one a warp.
WARPS = 4
# A lane keeps its part of dweight in registers: this many pairs, so E is at most 64 * PAIRS.
PAIRS = 4
LANE_VALUES = 2 * PAIRS
# What stands in for absent weights on the numpy device.
_EMPTY = np.empty(0, np.float32)
_EMPTY_ROWS = np.empty((0, 0), np.float32)
# Warps of the backward at most, each with a partial sum of dweight: what 132 SMs hold at 128 registers a
# thread. Part of the arithmetic.
SUMMING_WARPS = 2112


@device_function
def store_pair(first, second, out, row, head, e):
    """Write elements e and e + E/2 of a head."""
    out[row, head, e] = narrow(first, out)
    out[row, head, e + out.shape[2] // 2] = narrow(second, out)


@cuda.jit
def qkv_split_kernel(qkv, cos, sin, position_ids, q, k, v):
    """A block owns a token, a warp every WARPS-th head, a lane every 32nd pair of the head."""
    row = cuda.blockIdx.x
    position = position_ids[row]
    half = q.shape[2] // 2
    rotated = q.shape[1] + k.shape[1]
    for head in range(cuda.threadIdx.y, rotated + v.shape[1], WARPS):
        start = head * q.shape[2]
        for e in range(cuda.threadIdx.x, half, 32):
            first = widen(qkv[row, start + e])
            second = widen(qkv[row, start + half + e])
            if head >= rotated:
                store_pair(first, second, v, row, head - rotated, e)
            else:
                c = cos[position, e]
                s = sin[position, e]
                if head < q.shape[1]:
                    store_pair(first * c - second * s, second * c + first * s, q, row, head, e)
                else:
                    store_pair(first * c - second * s, second * c + first * s, k, row, head - q.shape[1], e)


@cuda.jit
def qkv_split_norm_kernel(qkv, q_weight, k_weight, eps, cos, sin, position_ids, q, k, v, rstd):
    """As qkv_split_kernel, with a first pass over each query and key head for its mean square."""
    row = cuda.blockIdx.x
    position = position_ids[row]
    half = q.shape[2] // 2
    rotated = q.shape[1] + k.shape[1]
    for head in range(cuda.threadIdx.y, rotated + v.shape[1], WARPS):
        start = head * q.shape[2]
        scale = np.float32(1.0)
        if head < rotated:
            squares = np.float32(0.0)
            for e in range(cuda.threadIdx.x, half, 32):
                first = widen(qkv[row, start + e])
                second = widen(qkv[row, start + half + e])
                squares += first * first + second * second
            mean = warp_sum(squares) / np.float32(q.shape[2])
            scale = np.float32(1.0) / math.sqrt(mean + eps)
            if cuda.threadIdx.x == 0:
                rstd[row, head] = scale
        for e in range(cuda.threadIdx.x, half, 32):
            first = widen(qkv[row, start + e]) * scale
            second = widen(qkv[row, start + half + e]) * scale
            if head >= rotated:
                store_pair(first, second, v, row, head - rotated, e)
            else:
                c = cos[position, e]
                s = sin[position, e]
                if head < q.shape[1]:
                    first *= widen(q_weight[e])
                    second *= widen(q_weight[half + e])
                    store_pair(first * c - second * s, second * c + first * s, q, row, head, e)
                else:
                    first *= widen(k_weight[e])
                    second *= widen(k_weight[half + e])
                    store_pair(first * c - second * s, second * c + first * s, k, row, head - q.shape[1], e)


@cuda.jit
def qkv_split_backward_kernel(dq, dk, dv, cos, sin, position_ids, dqkv):
    """A block owns a token, a warp every WARPS-th head: rotate back and write side by side."""
    row = cuda.blockIdx.x
    position = position_ids[row]
    half = dq.shape[2] // 2
    rotated = dq.shape[1] + dk.shape[1]
    for head in range(cuda.threadIdx.y, rotated + dv.shape[1], WARPS):
        start = head * dq.shape[2]
        for e in range(cuda.threadIdx.x, half, 32):
            c = cos[position, e]
            s = sin[position, e]
            if head < dq.shape[1]:
                first = widen(dq[row, head, e])
                second = widen(dq[row, head, half + e])
            elif head < rotated:
                first = widen(dk[row, head - dq.shape[1], e])
                second = widen(dk[row, head - dq.shape[1], half + e])
            else:
                first = widen(dv[row, head - rotated, e])
                second = widen(dv[row, head - rotated, half + e])
                c = np.float32(1.0)
                s = np.float32(0.0)
            dqkv[row, start + e] = narrow(first * c + second * s, dqkv)
            dqkv[row, start + half + e] = narrow(second * c - first * s, dqkv)


@cuda.jit
def norm_rope_backward_kernel(dout, first_head, qkv, weight, cos, sin, position_ids, rstd, dqkv, partials):
    """dqkv of the heads of dout (N, heads, E), the first of which is head first_head of qkv.

    A warp owns every warps-th (token, head) and one row of partials, its sum of g x^ over them in their
    order; a lane every 32nd pair (e, e + E/2). One pass over memory: a head's g and x^ stay in registers
    while the warp forms mean(u x^). Loops over pairs have a constant number of turns, so that the compiler
    unrolls them and the local arrays become registers.
    """
    warps = cuda.gridDim.x * WARPS
    warp = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
    heads = dout.shape[1]
    width = dout.shape[2]
    half = width // 2
    zero = np.float32(0.0)
    weights = cuda.local.array(LANE_VALUES, np.float32)
    dweight = cuda.local.array(LANE_VALUES, np.float32)
    g = cuda.local.array(LANE_VALUES, np.float32)
    x = cuda.local.array(LANE_VALUES, np.float32)
    for i in range(PAIRS):
        e = cuda.threadIdx.x + 32 * i
        for j in range(2):
            weights[2 * i + j] = zero
            dweight[2 * i + j] = zero
            g[2 * i + j] = zero
            x[2 * i + j] = zero
            if e < half:
                weights[2 * i + j] = widen(weight[e + j * half])
    for index in range(warp, dout.shape[0] * heads, warps):
        row = index // heads
        head = index % heads
        start = (first_head + head) * width
        position = position_ids[row]
        scale = rstd[row, first_head + head]
        projection = zero
        for i in range(PAIRS):
            e = cuda.threadIdx.x + 32 * i
            if e < half:
                c = cos[position, e]
                s = sin[position, e]
                first = widen(dout[row, head, e])
                second = widen(dout[row, head, half + e])
                g[2 * i] = first * c + second * s
                g[2 * i + 1] = second * c - first * s
                x[2 * i] = widen(qkv[row, start + e]) * scale
                x[2 * i + 1] = widen(qkv[row, start + half + e]) * scale
                projection += g[2 * i] * weights[2 * i] * x[2 * i]
                projection += g[2 * i + 1] * weights[2 * i + 1] * x[2 * i + 1]
        projection = warp_sum(projection) / np.float32(width)
        for i in range(PAIRS):
            e = cuda.threadIdx.x + 32 * i
            if e < half:
                for j in range(2):
                    value = scale * (g[2 * i + j] * weights[2 * i + j] - x[2 * i + j] * projection)
                    dqkv[row, start + e + j * half] = narrow(value, dqkv)
                    dweight[2 * i + j] += g[2 * i + j] * x[2 * i + j]
    for i in range(PAIRS):
        e = cuda.threadIdx.x + 32 * i
        if e < half:
            partials[warp, e] = dweight[2 * i]
            partials[warp, half + e] = dweight[2 * i + 1]


@cuda.jit
def copy_heads_kernel(heads, first_head, qkv):
    """qkv from head first_head on = heads (N, heads, E); a block owns a token, a warp every WARPS-th head."""
    row = cuda.blockIdx.x
    width = heads.shape[2]
    for head in range(cuda.threadIdx.y, heads.shape[1], WARPS):
        for e in range(cuda.threadIdx.x, width, 32):
            qkv[row, (first_head + head) * width + e] = heads[row, head, e]


def _check_heads(op, qkv, heads, q_weight, k_weight, cos, sin, position_ids, rstd):
    """Check what both directions share; heads: (name, array) of the three split arrays. Returns (N, H, HK, E)."""
    (q_name, q), (k_name, k), (v_name, v) = heads
    rows, query_heads, width = check(op, q_name, q, (None, None, None), FLOATS)
    _, kv_heads, _ = check(op, k_name, k, (rows, None, width), (q.dtype,))
    check(op, v_name, v, (rows, kv_heads, width), (q.dtype,))
    check(op, "qkv", qkv, (rows, (query_heads + 2 * kv_heads) * width), (q.dtype,))
    check_tables(op, width, cos, sin)
    check(op, "position_ids", position_ids, (rows,), I32)
    if width > 32 * LANE_VALUES:
        raise ValueError(f"{op}: head_dim must be at most {32 * LANE_VALUES}, got {width}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError(f"{op}: q_weight and k_weight must both be arrays or both None")
    if q_weight is not None:
        check(op, "q_weight", q_weight, (width,), (q.dtype,))
        check(op, "k_weight", k_weight, (width,), (q.dtype,))
        check(op, "rstd", rstd, (rows, query_heads + kv_heads), F32)
    return rows, query_heads, kv_heads, width


def qkv_split(qkv, q_weight, k_weight, eps, cos, sin, position_ids, q, k, v, rstd):
    """Split qkv into heads, normalise query and key heads if weights are given, and rotate them.

    qkv (N, (H + 2 HK) E) as [q heads | k heads | v heads]; q_weight, k_weight (E,) of the same dtype, or
    both None (then eps and rstd are not used, and rstd may be None); cos, sin (P, E/2) float32;
    position_ids (N,) int32 in [0, P). q (N, H, E), k, v (N, HK, E) of qkv's dtype and rstd (N, H + HK)
    float32 are written. E is even and at most 256. Raises ValueError for other shapes, dtypes or layouts.
    Source: Qwen3's q_norm and k_norm (transformers, Qwen3Attention), rope as rope.py.
    """
    heads = (("q", q), ("k", k), ("v", v))
    rows, *_ = _check_heads("qkv_split", qkv, heads, q_weight, k_weight, cos, sin, position_ids, rstd)
    if device.name() == "numpy":
        norm = (_EMPTY, _EMPTY) if q_weight is None else (q_weight, k_weight)
        rstd = _EMPTY_ROWS if q_weight is None else rstd
        qkv_cpu.split(qkv, *norm, np.float32(eps), cos, sin, position_ids, q, k, v, rstd)
        return
    block = (32, WARPS)
    if q_weight is None:
        launch(qkv_split_kernel, rows, block, qkv, cos, sin, position_ids, q, k, v)
    else:
        arguments = (qkv, q_weight, k_weight, float(eps), cos, sin, position_ids, q, k, v, rstd)
        launch(qkv_split_norm_kernel, rows, block, *arguments)


def qkv_split_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, position_ids, rstd, dqkv, dq_weight, dk_weight):
    """The gradient of qkv_split: dqkv =, and if there are weights dq_weight, dk_weight +=.

    dq (N, H, E), dk, dv (N, HK, E), qkv and dqkv (N, (H + 2 HK) E), weights (E,) of one dtype; rstd as the
    forward wrote it; dq_weight, dk_weight (E,) float32, None where the weights are. Raises ValueError for
    other shapes, dtypes or layouts.
    """
    op = "qkv_split_backward"
    heads = (("dq", dq), ("dk", dk), ("dv", dv))
    rows, query_heads, kv_heads, width = _check_heads(op, qkv, heads, q_weight, k_weight, cos, sin, position_ids, rstd)
    check(op, "dqkv", dqkv, qkv.shape, (qkv.dtype,))
    if q_weight is not None:
        check(op, "dq_weight", dq_weight, (width,), F32)
        check(op, "dk_weight", dk_weight, (width,), F32)
    if device.name() == "numpy":
        norm, dnorm = ((q_weight, k_weight), (dq_weight, dk_weight))
        if q_weight is None:
            norm, dnorm, rstd = (_EMPTY, _EMPTY), (_EMPTY, _EMPTY), _EMPTY_ROWS
        qkv_cpu.split_backward(dq, dk, dv, qkv, *norm, cos, sin, position_ids, rstd, dqkv, *dnorm)
        return
    if q_weight is None:
        launch(qkv_split_backward_kernel, rows, (32, WARPS), dq, dk, dv, cos, sin, position_ids, dqkv)
        return
    launch(copy_heads_kernel, rows, (32, WARPS), dv, query_heads + kv_heads, dqkv)
    tables = (cos, sin, position_ids, rstd)
    for dout, first_head, weight, dweight in ((dq, 0, q_weight, dq_weight), (dk, query_heads, k_weight, dk_weight)):
        blocks = min(SUMMING_WARPS // WARPS, -(-dout.shape[0] * dout.shape[1] // WARPS))
        partials = device.xp().empty((blocks * WARPS, width), np.float32)
        arguments = (dout, first_head, qkv, weight, *tables, dqkv, partials)
        launch(norm_rope_backward_kernel, blocks, (32, WARPS), *arguments)
        column_sum(partials, dweight)


def qkv_split_ref(qkv, q_weight, k_weight, eps, cos, sin, position_ids, heads, kv_heads):
    """(q, k, v, rstd) of qkv_split, in qkv's precision; rstd is None without weights."""
    rows, width = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    split = qkv.reshape(rows, heads + 2 * kv_heads, width)
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=1)
    rstd = None
    if q_weight is not None:
        q_normed, q_rstd = rmsnorm_ref(q.reshape(-1, width), q_weight, eps)
        k_normed, k_rstd = rmsnorm_ref(k.reshape(-1, width), k_weight, eps)
        q, k = q_normed.reshape(q.shape), k_normed.reshape(k.shape)
        rstd = np.concatenate([q_rstd.reshape(rows, heads), k_rstd.reshape(rows, kv_heads)], axis=1)
    return rope_ref(q, cos, sin, position_ids), rope_ref(k, cos, sin, position_ids), v, rstd


def qkv_split_backward_ref(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, position_ids, rstd):
    """(dqkv, dq_weight, dk_weight) of qkv_split_backward, in qkv's precision; None without weights."""
    rows, heads, width = dq.shape
    kv_heads = dk.shape[1]
    dq = rope_ref(dq, cos, sin, position_ids, inverse=True)
    dk = rope_ref(dk, cos, sin, position_ids, inverse=True)
    dq_weight = dk_weight = None
    if q_weight is not None:
        split = qkv.reshape(rows, heads + 2 * kv_heads, width)
        q, k, _ = np.split(split, [heads, heads + kv_heads], axis=1)
        q_rstd, k_rstd = rstd[:, :heads].reshape(-1), rstd[:, heads:].reshape(-1)
        dx, dq_weight = rmsnorm_backward_ref(dq.reshape(-1, width), q.reshape(-1, width), q_weight, q_rstd)
        dq = dx.reshape(dq.shape)
        dx, dk_weight = rmsnorm_backward_ref(dk.reshape(-1, width), k.reshape(-1, width), k_weight, k_rstd)
        dk = dx.reshape(dk.shape)
    return np.concatenate([dq, dk, dv], axis=1).reshape(qkv.shape), dq_weight, dk_weight
