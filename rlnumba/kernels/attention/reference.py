"""NumPy references of attention and its gradient, in float64: one sequence and one query head at a time."""

import numpy as np


def hidden_keys(queries, keys, window):
    """Whether a query does not see a key: (queries, keys) bool. The queries are the last ones; window: 0 for none."""
    distance = np.arange(keys - queries, keys)[:, None] - np.arange(keys)
    return (distance < 0) | (window > 0) & (distance >= window)


def attention_ref(q, k, v, cu_seqlens, scale, window=0, cu_seqlens_k=None):
    """(out, lse) of attention; cu_seqlens_k: of k and v, if q has the last tokens of each sequence only."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out, lse = np.zeros(q.shape), np.zeros((q.shape[1], q.shape[0]))
    bounds = (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    spans = (zip(x[:-1], x[1:], strict=True) for x in bounds)
    for (start, end), (first, last) in zip(*spans, strict=True):
        mask = np.where(hidden_keys(end - start, last - first, window), -np.inf, 0.0)
        for h in range(q.shape[1]):
            kv_head = h * k.shape[1] // q.shape[1]
            s = scale * q[start:end, h] @ k[first:last, kv_head].T + mask
            lse[h, start:end] = np.logaddexp.reduce(s, axis=1)
            out[start:end, h] = np.exp(s - lse[h, start:end, None]) @ v[first:last, kv_head]
    return out, lse


def attention_backward_ref(dout, q, k, v, cu_seqlens, scale, window=0):
    """(dq, dk, dv) of attention."""
    dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        rows = slice(start, end)
        for h in range(q.shape[1]):
            kv_head = h * k.shape[1] // q.shape[1]
            p = np.exp(scale * q[rows, h] @ k[rows, kv_head].T)
            p[hidden_keys(end - start, end - start, window)] = 0
            p /= p.sum(axis=1, keepdims=True)
            dp = dout[rows, h] @ v[rows, kv_head].T
            ds = p * (dp - np.sum(p * dp, axis=1, keepdims=True))
            dq[rows, h] = scale * ds @ k[rows, kv_head]
            dk[rows, kv_head] += scale * ds.T @ q[rows, h]
            dv[rows, kv_head] += p.T @ dout[rows, h]
    return dq, dk, dv
