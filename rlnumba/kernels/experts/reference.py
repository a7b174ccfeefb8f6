"""Mixtures of experts by their formulas, in NumPy: the cpu device's operators, and what tests compare kernels with.

Arguments are in float64, or in float32 or 16 bits with float32 inside and roundings where the operators have them. A
row's result depends on that row alone.
"""

import numpy as np


def _wide(x):
    """x in the precision of sums: float64 as it is, else float32."""
    return x if x.dtype == np.float64 else x.astype(np.float32)


def _row_sums(x):
    """The sums (N, 1) over the columns of x: 32 sums of every 32nd column, ascending, then a butterfly."""
    steps = -(-x.shape[1] // 32)
    padded = np.zeros((len(x), 32 * steps), x.dtype)
    padded[:, : x.shape[1]] = x
    total = padded[:, :32]
    for i in range(1, steps):
        total = total + padded[:, 32 * i : 32 * (i + 1)]
    for distance in (16, 8, 4, 2, 1):
        total = total + total[:, np.arange(32) ^ distance]
    return total[:, :1]


def _in_order(x):
    """The sums (N, ...) over the second axis of x (N, k, ...), in its order."""
    total = x[:, 0]
    for j in range(1, x.shape[1]):
        total = total + x[:, j]
    return total


def shares_ref(scores):
    """The softmax of rows of scores: each expert's share."""
    scores = _wide(scores)
    with np.errstate(invalid="ignore"):
        e = np.exp(scores - np.max(np.where(np.isnan(scores), -np.inf, scores), axis=1, keepdims=True))
        return e / _row_sums(e)


def _normalised(shares):
    """Shares over their sum; 0 where all are 0."""
    total = _in_order(shares)[:, None]
    return np.where(total == 0, 0, shares / np.where(total == 0, 1, total)), total


def route_ref(scores, top_k, normalise, recorded=None):
    """(experts, weights before they are rounded) of route."""
    ranked = np.where(np.isnan(_wide(scores)), -np.inf, _wide(scores))
    experts = np.argsort(-ranked, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    if recorded is not None:
        experts = np.where(recorded[:, :1] < 0, experts, recorded)
    weights = np.take_along_axis(shares_ref(scores), experts.astype(np.int64), axis=1)
    return experts, _normalised(weights)[0] if normalise else weights


def route_backward_ref(dweights, scores, experts, normalise, slopes=None, num_tokens=None):
    """dscores of route_backward."""
    shares, experts = shares_ref(scores), experts.astype(np.int64)
    dshares = np.zeros_like(shares)
    if normalise:
        weights, total = _normalised(np.take_along_axis(shares, experts, axis=1))
        dchosen = (dweights - _in_order(weights * dweights)[:, None]) * (total != 0) / np.where(total == 0, 1, total)
    else:
        dchosen = dweights
    np.put_along_axis(dshares, experts, dchosen, axis=1)
    if slopes is not None:
        dshares[:num_tokens] += slopes
    return shares * (dshares - _row_sums(shares * dshares))


def dispatch_ref(experts, num_experts):
    """(starts, row_of, slot_of) of dispatch."""
    order = np.argsort(experts, axis=None, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(experts.reshape(-1), minlength=num_experts))])
    slot_of = np.empty(experts.size, np.int32)
    slot_of[order] = np.arange(experts.size)
    return starts.astype(np.int32), (order // experts.shape[1]).astype(np.int32), slot_of.reshape(experts.shape)


def combine_ref(rows, weights, slot_of, residual=None):
    """out of combine; without weights, dx of gather_rows_backward."""
    chosen = rows[slot_of]
    # 16-bit products are rounded to their dtype.
    products = chosen if weights is None else weights[..., None] * chosen
    out = _in_order(_wide(products)).astype(rows.dtype)
    return out if residual is None else residual + out


def weigh_rows_backward_ref(drows, rows, weights, slot_of):
    """(drows, rows, dweights) after weigh_rows_backward."""
    of_row = np.empty((len(rows), 1), weights.dtype)
    of_row[slot_of, 0] = weights
    products = np.sum(_wide(drows) * _wide(rows), axis=1)
    return of_row * drows, of_row * rows, products[slot_of]


def router_load_ref(scores, starts, row_of, num_tokens):
    """(counts, shares) that add_router_load adds."""
    expert_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    counts = np.bincount(expert_of[row_of < num_tokens], minlength=len(starts) - 1)
    return counts, np.sum(shares_ref(scores[:num_tokens]), axis=0)


def router_loss_ref(counts, shares, num_rows, weight):
    """(loss, slopes) of router_loss."""
    chosen = len(counts) * counts.astype(shares.dtype) / num_rows
    return np.sum(chosen * shares / num_rows), weight * chosen / num_rows
