"""qkv_split and its backward on the cpu device: one pass over memory, compiled by numba.njit.

The formulas are in qkv.py. NumPy would take twenty passes, which cost as much as the GEMMs next to it. A head is
computed from its own values in one order, whatever else is in the batch; without fastmath every operation rounds as
IEEE 754 says, vectorised or not. Without norm, weights, their gradients and rstd are empty; in inference rstd is, too.
"""

import numba
import numpy as np

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@numba.njit(cache=True, error_model="numpy")
def split(qkv, q_weight, k_weight, eps, cos, sin, position_ids, slots, q, k, v, rstd):
    """q, k, v and rstd of qkv_split, k and v of row n in row slots[n] of theirs; -1: they are not written."""
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[2]
    half, normed, turned = width // 2, q_weight.shape[0] > 0, cos.shape[1]
    # Query heads may have gates behind them.
    step = (qkv.shape[1] // width - 2 * kv_heads) // heads
    for row in range(qkv.shape[0]):
        position, slot = position_ids[row], slots[row]
        if position < 0 or position >= cos.shape[0]:
            raise ValueError("qkv_split: position_ids must lie within the tables")
        if slot < -1 or slot >= k.shape[0]:
            raise ValueError("qkv_split_to_cache: slot_mapping must lie within the caches")
        for head in range(heads + kv_heads if slot >= 0 else heads):
            place = head * step if head < heads else head + heads * (step - 1)
            x = qkv[row, place * width : (place + 1) * width]
            weight = q_weight if head < heads else k_weight
            out = q[row, head] if head < heads else k[slot, head - heads]
            scale = _ONE
            if normed:
                first_squares, second_squares = _ZERO, _ZERO
                for e in range(half):
                    first_squares += x[e] * x[e]
                    second_squares += x[half + e] * x[half + e]
                scale = _ONE / np.sqrt((first_squares + second_squares) / np.float32(width) + eps)
                if rstd.shape[0] > 0:
                    rstd[row, head] = scale
            for e in range(turned):
                first, second = x[e], x[turned + e]
                if normed:
                    first *= scale * weight[e]
                    second *= scale * weight[turned + e]
                out[e] = first * cos[position, e] - second * sin[position, e]
                out[turned + e] = second * cos[position, e] + first * sin[position, e]
            for e in range(2 * turned, width):
                out[e] = x[e] * (scale * weight[e]) if normed else x[e]
        if slot >= 0:
            v[slot] = qkv[row, (heads * step + kv_heads) * width :].reshape((kv_heads, width))


@numba.njit(cache=True, error_model="numpy")
def split_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, position_ids, rstd, dqkv, dq_weight, dk_weight):
    """dqkv =, dq_weight and dk_weight += of qkv_split_backward."""
    heads, kv_heads, width = dq.shape[1], dk.shape[1], dq.shape[2]
    half, normed, turned = width // 2, q_weight.shape[0] > 0, cos.shape[1]
    step = (qkv.shape[1] // width - 2 * kv_heads) // heads
    g, dweight = np.empty(width, np.float32), np.zeros((2, width), np.float32)
    for row in range(qkv.shape[0]):
        position = position_ids[row]
        for head in range(heads + kv_heads):
            is_key = 1 if head >= heads else 0
            dout = dk[row, head - heads] if is_key else dq[row, head]
            place = head * step if head < heads else head + heads * (step - 1)
            dx = dqkv[row, place * width : (place + 1) * width]
            for e in range(turned):
                g[e] = dout[e] * cos[position, e] + dout[turned + e] * sin[position, e]
                g[turned + e] = dout[turned + e] * cos[position, e] - dout[e] * sin[position, e]
            g[2 * turned :] = dout[2 * turned :]
            if not normed:
                dx[:] = g
                continue
            x = qkv[row, place * width : (place + 1) * width]
            weight = k_weight if is_key else q_weight
            scale = rstd[row, head]
            first_sum, second_sum = _ZERO, _ZERO
            for e in range(half):
                first_sum += g[e] * weight[e] * x[e]
                second_sum += g[half + e] * weight[half + e] * x[half + e]
            projection = (first_sum + second_sum) * scale / np.float32(width)
            for e in range(width):
                normalised = x[e] * scale
                dx[e] = scale * (g[e] * weight[e] - normalised * projection)
                dweight[is_key, e] += g[e] * normalised
        dqkv[row, (heads * step + kv_heads) * width :] = dv[row].reshape(kv_heads * width)
    if normed:
        dq_weight += dweight[0]
        dk_weight += dweight[1]
