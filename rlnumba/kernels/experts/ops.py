"""Mixtures of experts around their GEMMs: router, rows of each expert, weighted sum; forward, backward, load.

    p = softmax(scores) over all E experts      e_1, ..., e_k: the k largest scores, descending; ties: the lower index
    w_j = p_(e_j), with normalise over the sum of the k, added up in the order of j; rounded once to the scores' dtype
    out_t = sum over j of w_tj y_(slot_of[t, j])     in float32, in the order of j; each product is rounded, if 16 bits

    r = slot_of[t, j], y_r = A a_r:     g = A^T dout_t      dw_tj = g . a_r      da_r = w_tj g
    the rows' input x:                  dx_t = sum over j of dx_r, in the order of j
    dscores = p (dp - sum over E of p dp)      dp: dw_j at e_j, with normalise (dw_j - sum of w_i dw_i) / sum of p_(e_i)
    L = E sum over e of f_e P_e       f_e: rows of expert e over tokens, P_e: mean of p_e; dL/dp_e = E f_e / tokens

The sums of L are over the first tokens alone, whose number is on the device: those behind them are padding.

scores (T, E); experts (T, k) int32; rows of experts are sorted by expert, then by token: those of expert e are
starts[e], ..., starts[e + 1] - 1, row r is that of token row_of[r], and choice j of token t has row slot_of[t, j]. No
token is dropped. Everything is float32 inside. A row's sums have one order, and a token's results do not depend on the
others. All launches follow from shapes, so all operators may be captured in a CUDA graph.

A NaN among the scores of a token makes all its weights NaN, and is chosen as -inf would be. Training off-policy can
replay the experts that rollout recorded: scores are then taken at these, and have the same gradient.

Sources: transformers' Qwen3MoeTopKRouter, Qwen3_5MoeTopKRouter and load_balancing_loss_func; Fedus et al. 2021, Switch
Transformers, eq. 4 to 6; Ma et al. 2025, Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers (replay).
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check, check_all, unused
from rlnumba.kernels.experts.reference import (
    combine_ref,
    dispatch_ref,
    route_backward_ref,
    route_ref,
    router_load_ref,
    router_loss_ref,
    weigh_rows_backward_ref,
)
from rlnumba.kernels.experts.routing import (
    BLOCKS,
    ROUTER_LINES,
    route_backward_kernel,
    route_kernel,
    router_load_kernel,
    router_loss_kernel,
)
from rlnumba.kernels.experts.rows import (
    AT_ONCE,
    CHOICE_LINES,
    FEW_AT_ONCE,
    FEW_TOKENS,
    SORT_THREADS,
    STEP,
    THREADS,
    combine_kernel,
    dispatch_kernel,
    gather_rows_kernel,
    record_experts_kernel,
    weigh_rows_backward_kernel,
)
from rlnumba.kernels.nn.rmsnorm import add_partials
from rlnumba.kernels.ptx.warp import access_length
from rlnumba.runtime import device
from rlnumba.runtime.launch import launch

# A lane of the router has up to 16 experts in registers, and a lane for each choice.
MAX_EXPERTS, MAX_TOP_K = 512, 32
MOST_CHOICES = 1 << 31


class Routing(NamedTuple):
    """The experts of each token. experts (T, k) int32, by descending weight; weights (T, k) of the scores' dtype."""

    experts: object
    weights: object

    @classmethod
    def empty(cls, tokens, top_k, dtype, empty):
        """Arrays by empty(shape, dtype)."""
        return cls(empty((tokens, top_k), np.int32), empty((tokens, top_k), dtype))


class Dispatch(NamedTuple):
    """The rows of each expert. starts (E + 1,), row_of (T k,), slot_of (T, k), all int32, as above."""

    starts: object
    row_of: object
    slot_of: object

    @classmethod
    def empty(cls, tokens, top_k, num_experts, empty):
        """Arrays by empty(shape, dtype)."""
        shapes = (num_experts + 1,), (tokens * top_k,), (tokens, top_k)
        return cls(*(empty(shape, np.int32) for shape in shapes))


class RouterLoad(NamedTuple):
    """Sums over tokens and layers. counts (E,) int32: rows of each expert; shares (E,) float32: sums of softmax.

    num_tokens (1,) int32: the first tokens of each layer, which count.
    """

    counts: object
    shares: object
    num_tokens: object


def _check_scores(op, scores, top_k):
    """(T, E) of scores."""
    tokens, num_experts = check(op, "scores", scores, (None, None), FLOATS)
    if not 0 < num_experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: scores must be of 1 to {MAX_EXPERTS} experts, got {num_experts}")
    most = min(num_experts, MAX_TOP_K)
    if not 0 < top_k <= most:
        raise ValueError(f"{op}: a token must have 1 to {most} of {num_experts} experts, got {top_k}")
    return tokens, num_experts


def _check_range(op, name, experts, num_experts):
    """Raise ValueError if an expert of a NumPy array is outside [0, num_experts)."""
    wrong = (experts < 0) | (experts >= num_experts)
    if wrong.any():
        raise ValueError(f"{op}: {name} must be in [0, {num_experts}), got {experts[wrong][0]}")


def route(scores, normalise, routing, recorded=None):
    """Choose the experts of each token and their weights.

    scores (T, E) of a floating dtype; normalise: whether the weights of a token add up to 1; routing: Routing of T
    tokens, written. recorded (T, k) int32: experts to take instead of the largest, in their order; a row that begins
    with -1 has none. They are distinct and in [0, E), which the cpu device checks; elsewhere the weight of one outside
    is NaN. With normalise, weights are 0 where all recorded experts have a softmax of 0. ValueError for other arrays.
    """
    tokens, top_k = check("route", "experts", routing.experts, (None, None), I32)
    _, num_experts = _check_scores("route", scores, top_k)
    check("route", "scores", scores, (tokens, num_experts), FLOATS)
    check("route", "weights", routing.weights, (tokens, top_k), (scores.dtype,))
    if recorded is not None:
        check("route", "recorded", recorded, (tokens, top_k), I32)
    if device.name() == "cpu":
        if recorded is not None:
            _check_range("route", "recorded", recorded[recorded[:, 0] >= 0], num_experts)
        routing.experts[...], routing.weights[...] = route_ref(scores, top_k, normalise, recorded)
        return
    kernel = route_kernel(num_experts, top_k, bool(normalise), scores.itemsize == 2)
    grid = -(-tokens // ROUTER_LINES)
    launch(kernel, grid, (32, ROUTER_LINES), scores, unused(2) if recorded is None else recorded, *routing)


def route_backward(dweights, scores, experts, normalise, dscores, slopes=None, num_tokens=None):
    """The gradient of route's weights by the scores; the experts, chosen or recorded, are constants.

    dweights (T, k) float32; scores (T, E) and normalise as in route, experts (T, k) as it wrote them; dscores (T, E) of
    the scores' dtype is written. slopes (E,) float32 or None: the loss's derivative by p_e of each of the first
    num_tokens (1,) int32 rows, besides, such as router_loss writes it. Raises ValueError for other arrays.
    """
    op = "route_backward"
    tokens, top_k = check(op, "experts", experts, (None, None), I32)
    _, num_experts = _check_scores(op, scores, top_k)
    check_all(op, (tokens, num_experts), (scores.dtype,), scores=scores, dscores=dscores)
    check(op, "dweights", dweights, (tokens, top_k), F32)
    if slopes is not None:
        check(op, "slopes", slopes, (num_experts,), F32)
        check(op, "num_tokens", num_tokens, (1,), I32)
    if device.name() == "cpu":
        _check_range(op, "experts", experts, num_experts)
        count = None if slopes is None else int(num_tokens[0])
        dscores[...] = route_backward_ref(dweights, scores, experts, normalise, slopes, count)
        return
    kernel, grid = route_backward_kernel(num_experts, top_k, bool(normalise)), -(-tokens // ROUTER_LINES)
    if slopes is None:
        slopes, num_tokens = unused(1, np.float32), unused(1)
    launch(kernel, grid, (32, ROUTER_LINES), dweights, scores, experts, slopes, num_tokens, dscores)


def _check_dispatch(op, dispatched):
    """(T, k, E) of a Dispatch."""
    tokens, top_k = check(op, "slot_of", dispatched.slot_of, (None, None), I32)
    check(op, "row_of", dispatched.row_of, (tokens * top_k,), I32)
    (bounds,) = check(op, "starts", dispatched.starts, (None,), I32)
    if bounds < 2 or not top_k:
        raise ValueError(f"{op}: there must be an expert and a choice a token, got {bounds - 1} and {top_k}")
    return tokens, top_k, bounds - 1


def dispatch(experts, dispatched):
    """Sort the choices of all tokens by expert, then by token.

    experts (T, k) int32 in [0, E), distinct in a row, which the cpu device checks; elsewhere one outside of the range
    counts as E - 1. dispatched: Dispatch, written. Raises ValueError for other arrays, or 2^31 choices.
    """
    tokens, top_k, num_experts = _check_dispatch("dispatch", dispatched)
    check("dispatch", "experts", experts, (tokens, top_k), I32)
    if experts.size >= MOST_CHOICES:
        raise ValueError(f"dispatch: experts must have fewer than {MOST_CHOICES} elements, got {experts.size}")
    if device.name() == "cpu":
        _check_range("dispatch", "experts", experts, num_experts)
        for out, found in zip(dispatched, dispatch_ref(experts, num_experts), strict=True):
            out[...] = found
        return
    warps = min(max(-(-experts.size // STEP), 1), SORT_THREADS // 32)
    span = -(-experts.size // (STEP * warps)) * STEP
    kernel, flat = dispatch_kernel(top_k, access_length(experts.size, experts)), dispatched.slot_of.reshape(-1)
    arguments = experts.reshape(-1), span, dispatched.starts, dispatched.row_of, flat
    launch(kernel, num_experts, (32, warps), *arguments)


def record_experts(experts, slots, records):
    """records[slots[t]] = experts[t] for each token whose slot is not negative.

    experts (T, k) int32, as route wrote them; slots (T,) int32, below S, none twice; records (S, k) int16, which may be
    memory of the host (memory.shared_with_host). Raises ValueError for other arrays, or 2^31 choices.
    """
    op = "record_experts"
    tokens, top_k = check(op, "experts", experts, (None, None), I32)
    check(op, "slots", slots, (tokens,), I32)
    check(op, "records", records, (None, top_k), (np.dtype(np.int16),))
    if experts.size >= MOST_CHOICES:
        raise ValueError(f"{op}: experts must have fewer than {MOST_CHOICES} elements, got {experts.size}")
    if device.name() == "cpu":
        kept = slots >= 0
        records[slots[kept]] = experts[kept]
        return
    if experts.size:
        launch(record_experts_kernel, -(-experts.size // THREADS), THREADS, experts, slots, records)


def _row_blocks(tokens, columns, *arrays):
    """(grid, block, access, whether the last block of a row has columns beyond the end, blocks of a row)."""
    vectors = -(-columns * arrays[0].itemsize // 16)
    threads = min(-(-vectors // 32) * 32, THREADS)
    lines, parts = THREADS // threads, -(-vectors // threads)
    bounded = columns * arrays[0].itemsize % (16 * threads) != 0
    return -(-tokens // lines) * parts, (threads, lines), access_length(columns, *arrays), bounded, parts


def gather_rows(x, dispatched, out):
    """out[r] = x[row_of[r]], bit for bit: the rows of each expert.

    x (T, D) of a floating dtype; out (T k, D) of the same is written. Raises ValueError for other arrays.
    """
    tokens, top_k, _ = _check_dispatch("gather_rows", dispatched)
    _, columns = check("gather_rows", "x", x, (tokens, None), FLOATS)
    check("gather_rows", "out", out, (tokens * top_k, columns), (x.dtype,))
    if device.name() == "cpu":
        np.take(x, dispatched.row_of, axis=0, out=out, mode="clip")
        return
    element = np.uint32 if x.itemsize == 4 else np.uint16
    grid, block, *layout = _row_blocks(tokens, columns, x, out)
    kernel = gather_rows_kernel(top_k, element, *layout)
    launch(kernel, grid, block, x.view(element), dispatched.slot_of, out.view(element))


def gather_rows_backward(dout, dispatched, dx, accumulate=False):
    """The gradient of gather_rows: dx[t] = (or += if accumulate) sum over j of dout[slot_of[t, j]], in this order.

    dout (T k, D), dx (T, D) of one floating dtype; a sum is rounded before dx is added. ValueError for other arrays.
    """
    op = "gather_rows_backward"
    tokens, top_k, _ = _check_dispatch(op, dispatched)
    _, columns = check(op, "dout", dout, (tokens * top_k, None), FLOATS)
    check(op, "dx", dx, (tokens, columns), (dout.dtype,))
    if device.name() == "cpu":
        dx[...] = combine_ref(dout, None, dispatched.slot_of, dx if accumulate else None)
        return
    _combine(dout, None, dispatched, dx, dx if accumulate else None)


def combine(rows, weights, dispatched, out, residual=None):
    """out[t] = sum over j of weights[t, j] rows[slot_of[t, j]], in the order of j, and residual[t] after it.

    rows (T k, D) and weights (T, k) of one floating dtype; out (T, D) of the same is written; residual (T, D) of the
    same, which may be out, is added to the rounded sum. Raises ValueError for other arrays.
    """
    tokens, top_k, _ = _check_dispatch("combine", dispatched)
    _, columns = check("combine", "rows", rows, (tokens * top_k, None), FLOATS)
    check("combine", "weights", weights, (tokens, top_k), (rows.dtype,))
    check("combine", "out", out, (tokens, columns), (rows.dtype,))
    if residual is not None:
        check("combine", "residual", residual, (tokens, columns), (rows.dtype,))
    if device.name() == "cpu":
        out[...] = combine_ref(rows, weights, dispatched.slot_of, residual)
        return
    _combine(rows, weights, dispatched, out, residual)


def _combine(rows, weights, dispatched, out, residual):
    """Launch combine_kernel; without weights all are 1."""
    tokens, top_k = dispatched.slot_of.shape
    others = [array for array in (residual,) if array is not None]
    grid, block, *layout = _row_blocks(tokens, rows.shape[1], rows, out, *others)
    weights = unused(2, rows.dtype) if weights is None else weights
    residual = unused(2, rows.dtype) if residual is None else residual
    at_once = min(top_k, FEW_AT_ONCE if tokens <= FEW_TOKENS else AT_ONCE)
    kernel = combine_kernel(top_k, at_once, rows.dtype.name, *layout)
    launch(kernel, grid, block, rows, dispatched.slot_of, weights, residual, out)


def weigh_rows_backward(drows, rows, weights, dispatched, dweights, weighs_rows=True):
    """The gradient of combine's weights where its rows are a linear map of `rows`, whose outputs need not be kept.

    out_t = sum of w_tj A rows_r, so dw_tj = dout_t . A rows_r = drows_r . rows_r, where drows_r = A^T dout_t is the
    gradient of a row whose weight is 1. Then drows, and rows if weighs_rows, are multiplied by their weights: drows is
    the gradient of rows, and rows what dA = sum of dout_t rows_r^T takes.

    drows, rows (T k, F) and weights (T, k) of one floating dtype; dweights (T, k) float32 is written. Raises ValueError
    for other arrays.
    """
    op = "weigh_rows_backward"
    tokens, top_k, _ = _check_dispatch(op, dispatched)
    _, columns = check(op, "rows", rows, (tokens * top_k, None), FLOATS)
    check(op, "drows", drows, rows.shape, (rows.dtype,))
    check(op, "weights", weights, (tokens, top_k), (rows.dtype,))
    check(op, "dweights", dweights, (tokens, top_k), F32)
    if device.name() == "cpu":
        weighed = weigh_rows_backward_ref(drows, rows, weights, dispatched.slot_of)
        drows[...], rows[...], dweights[...] = weighed if weighs_rows else (weighed[0], rows, weighed[2])
        return
    vector, access = 16 // rows.itemsize, access_length(columns, drows, rows)
    kernel = weigh_rows_backward_kernel(top_k, vector, access, columns % vector != 0)
    arguments = drows, rows, dispatched.slot_of, weights, np.int32(weighs_rows), dweights
    launch(kernel, -(-tokens * top_k // CHOICE_LINES), (32, CHOICE_LINES), *arguments)


def add_router_load(scores, dispatched, load):
    """Add a layer's first load.num_tokens tokens to a RouterLoad: rows of each expert, and the sum of each expert's p.

    scores (T, E) of a floating dtype, dispatched those of its choices; load's counts and shares +=. The order of the
    sums depends on T alone. Raises ValueError for other arrays.
    """
    op = "add_router_load"
    tokens, top_k, num_experts = _check_dispatch(op, dispatched)
    _check_scores(op, scores, top_k)
    check(op, "scores", scores, (tokens, num_experts), FLOATS)
    check(op, "counts", load.counts, (num_experts,), I32)
    check(op, "shares", load.shares, (num_experts,), F32)
    check(op, "num_tokens", load.num_tokens, (1,), I32)
    if device.name() == "cpu":
        counts, shares = router_load_ref(scores, dispatched.starts, dispatched.row_of, int(load.num_tokens[0]))
        load.counts[...] += counts
        load.shares[...] += shares
        return
    if not tokens:
        return
    partials = device.xp().empty((min(-(-tokens // ROUTER_LINES), BLOCKS), num_experts), np.float32)
    arguments = scores, dispatched.starts, dispatched.row_of, load.num_tokens, load.counts, partials
    launch(router_load_kernel(num_experts), len(partials), (32, ROUTER_LINES), *arguments)
    add_partials(partials, load.shares)


def router_loss(load, num_layers, weight, loss, slopes):
    """The load balancing loss of all tokens of a RouterLoad, and weight times its derivative by p_e of each row.

    num_layers: those that were added to load, which has a token at least; weight (1,) float32; loss (1,) and slopes
    (E,), float32, are written. The derivative goes through p alone: f is a count. ValueError for other arrays.
    """
    (num_experts,) = check("router_loss", "counts", load.counts, (None,), I32)
    check_all("router_loss", (num_experts,), F32, shares=load.shares, slopes=slopes)
    check_all("router_loss", (1,), F32, weight=weight, loss=loss)
    check("router_loss", "num_tokens", load.num_tokens, (1,), I32)
    if num_layers < 1:
        raise ValueError(f"router_loss: num_layers must be at least 1, got {num_layers}")
    if device.name() == "cpu":
        num_rows = np.float32(load.num_tokens[0] * num_layers)
        loss[...], slopes[...] = router_loss_ref(load.counts, load.shares, num_rows, weight[0])
        return
    launch(router_loss_kernel, 1, 32, *load, np.float32(num_layers), weight, loss, slopes)
