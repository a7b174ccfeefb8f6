"""From the projection of linear attention to the inputs of the gated delta rule: convolution, norms, gates; backward.

A row of `projected` (N, columns) has [q | k | v | z | b | a] of a token (DeltaRuleHeads). With c over the channels of
q, k and v, and x their columns, zero before the sequence begins:

    u_t = sum over j = 0..3 of conv[:, j] x_(t - 3 + j), the oldest first      y_t = u_t sigmoid(u_t)
    q = K^-0.5 y / sqrt(sum y^2 + 1e-6),  k = y / sqrt(sum y^2 + 1e-6), a head at a time,  v = y
    beta = sigmoid(b)      log_decay = max(-exp(A_log) softplus(a + dt_bias), LEAST_LOG_DECAY)

u, y and beta are rounded to the model's dtype, as in transformers; q and k are operands (arithmetic.py). Backward:

    dy of v = dv; of q and k, with r = 1 / sqrt(sum y^2 + 1e-6): scale r (dout - y r^2 (y . dout))
    du = dy s (1 + u (1 - s)), s = sigmoid(u)
    dx_t = sum over i = 0..3 of conv[:, 3 - i] du_(t + i)      dconv[:, j] = sum over t of du_t x_(t - 3 + j)
    db = dbeta beta (1 - beta)      da = -dlog_decay exp(A_log) sigmoid(a + dt_bias), 0 where log_decay is the least
    dA_log = sum of dlog_decay log_decay, there too without those      ddt_bias = sum of da

Sums over tokens add the tiles of TOKENS tokens in a fixed order. Source: transformers' Qwen3_5GatedDeltaNet.

A sequence with a prefix has its parent's last rows before its own. dx of a parent's last three rows is the sum over t
among its own rows, and then its children's.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check, check_all, check_bounds, unused
from rlnumba.kernels.delta_rule.arithmetic import (
    BLOCK,
    LEAST_LOG_DECAY,
    PlainSequences,
    PrefixSequences,
    StateSequences,
    Tokens,
    check_parents,
    check_places,
    operand_dtype,
)
from rlnumba.kernels.delta_rule.input_gradient import (
    CHILD_LINES,
    GATE_LINES,
    THREADS,
    TOKENS,
    delta_rule_inputs_gradient_kernel,
    gates_gradient_kernel,
    last_rows_gradient_kernel,
)
from rlnumba.kernels.delta_rule.input_rows import (
    EPS,
    LINES,
    TAPS,
    accesses_of,
    delta_rule_inputs_kernel,
)
from rlnumba.kernels.nn.elementwise import accumulate
from rlnumba.kernels.nn.rmsnorm import add_partials
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# Rows of a slot of ConvCache where no token is taken back.
CONV_ROWS = 4
# Tokens that a warp of the forward takes one after another, whose rows before it loads once, and the warps that must be
# left for this.
TILE, ENOUGH_WARPS = 16, 4096


class InputWeights(NamedTuple):
    """Parameters, or their float32 gradients: conv (channels, 4), a_log and dt_bias (HV,) of the model's dtype."""

    conv: object
    a_log: object
    dt_bias: object


class ConvCache(NamedTuple):
    """Columns of the channels before a sequence's new tokens, of the model's dtype.

    rows (slots, R, channels): position p is in row p % R, R at least 3 and the tokens of a call that may be taken back.
    page_rows (pages, 3, channels): the three tokens before the boundary of each page of states, read by sequences that
    resume there, as long as their convolution reaches back so far.
    """

    rows: object
    page_rows: object


def empty_tokens(count, heads, dtype, empty, operand):
    """Tokens of DeltaRuleHeads in a model's dtype, of which q and k have the dtype `operand`; empty(shape, dtype)."""
    keys, values = (count, heads.key_heads, heads.key_dim), (count, heads.value_heads, heads.value_dim)
    kinds = (keys, operand), (keys, operand), (values, dtype), (values[:2], np.float32), (values[:2], np.float32)
    return Tokens(*(empty(shape, kind) for shape, kind in kinds))


@cuda.jit
def store_conv_rows_kernel(projected, sequences, rows):
    """The channels' columns of each sequence's last new tokens, into its slot; after all have read those before.

    A block owns a sequence.
    """
    b = cuda.blockIdx.x
    begin, end = sequences.cu_seqlens[b], sequences.cu_seqlens[b + 1]
    if sequences.context_lens[b] == 0:
        return
    for t in range(max(begin, end - rows.shape[1]), end):
        row = (sequences.context_lens[b] - end + t) % rows.shape[1]
        for channel in range(cuda.threadIdx.x, rows.shape[2], cuda.blockDim.x):
            rows[sequences.slots[b], row, channel] = projected[t, channel]


def _check(op, projected, weights, heads, cu_seqlens):
    """N, the number of tokens."""
    tokens, _ = check(op, "projected", projected, (None, heads.columns), FLOATS)
    check(op, "conv", weights.conv, (heads.channels, TAPS), (projected.dtype,))
    check_all(op, (heads.value_heads,), (projected.dtype,), a_log=weights.a_log, dt_bias=weights.dt_bias)
    check_bounds(op, "cu_seqlens", cu_seqlens)
    return tokens


def _check_tokens(op, tokens, count, heads, operand, dtype):
    keys = count, heads.key_heads, heads.key_dim
    check_all(op, keys, (operand,), q=tokens.q, k=tokens.k)
    check(op, "v", tokens.v, (count, heads.value_heads, heads.value_dim), (dtype,))
    check_all(op, (count, heads.value_heads), F32, beta=tokens.beta, log_decay=tokens.log_decay)


def delta_rule_inputs(projected, weights, heads, sequences, tokens, cache=None, prefixes=None):
    """The Tokens of packed sequences from their projection; with a ConvCache, of new tokens of sequences in the cache.

    projected (N, columns) of a floating dtype; weights: InputWeights; heads: DeltaRuleHeads; sequences: cu_seqlens
    (B + 1,) int32, or with a cache StateSequences; tokens: Tokens, which are written; prefixes: PackedPrefixes, or
    None. Raises ValueError for other shapes, dtypes or layouts.
    """
    op = "delta_rule_inputs"
    if cache is None:
        check_parents(op, sequences, prefixes)
        if prefixes is None:
            sequences = StateSequences(sequences, unused(), unused(2), unused(), unused())
        else:
            sequences = PrefixSequences(sequences, prefixes.parents)
    count = _check(op, projected, weights, heads, sequences.cu_seqlens)
    _check_tokens(op, tokens, count, heads, operand_dtype(projected.dtype), projected.dtype)
    if cache is not None:
        check(op, "rows", cache.rows, (None, None, heads.channels), (projected.dtype,))
        check(op, "page_rows", cache.page_rows, (None, TAPS - 1, heads.channels), (projected.dtype,))
        check_places(op, sequences, len(sequences.cu_seqlens) - 1)
    if device.name() == "cpu":
        x = projected[:, : heads.channels]
        taps = _packed_taps(x, sequences.cu_seqlens, prefixes) if cache is None else _paged_taps(x, sequences, cache)
        for out, array in zip(tokens, _tokens_of(projected, taps, weights, heads), strict=True):
            out[...] = array
        return
    is_paged = cache is not None
    cache = cache or ConvCache(unused(3, projected.dtype), unused(3, projected.dtype))
    units = 2 * heads.key_heads + heads.value_heads
    arrays = projected, tokens.q, tokens.k, tokens.v, cache.rows, cache.page_rows
    accesses = accesses_of(heads, weights.conv, *arrays)
    kernel = delta_rule_inputs_kernel(tuple(heads), projected.dtype.name, is_paged, accesses, prefixes is not None)
    tile = min(max(count * units // ENOUGH_WARPS, 1), TILE)
    grid = -(-(-(-count // tile) * units) // LINES)
    flat = tokens._replace(q=tokens.q.reshape(-1), k=tokens.k.reshape(-1), v=tokens.v.reshape(-1))
    launch(kernel, grid, (32, LINES), projected.reshape(-1), weights, sequences, cache, flat, tile)
    if is_paged:
        launch(store_conv_rows_kernel, len(sequences.slots), THREADS, projected, sequences, cache.rows)


def delta_rule_inputs_backward(gradients, projected, weights, heads, cu_seqlens, dprojected, dweights, prefixes=None):
    """The gradient of delta_rule_inputs of packed sequences: columns of dprojected, and dweights +=.

    gradients: Tokens, of which q, k and v have projected's dtype; dprojected (N, columns) of the same: all columns but
    z's are written; dweights: InputWeights of float32, or None where they are not trained. Raises ValueError for other
    shapes, dtypes or layouts.
    """
    op, dtype = "delta_rule_inputs_backward", projected.dtype
    count = _check(op, projected, weights, heads, cu_seqlens)
    check_parents(op, cu_seqlens, prefixes)
    _check_tokens(op, gradients, count, heads, dtype, dtype)
    check(op, "dprojected", dprojected, projected.shape, (dtype,))
    if dweights is not None:
        check(op, "dconv", dweights.conv, weights.conv.shape, F32)
        check_all(op, weights.a_log.shape, F32, da_log=dweights.a_log, ddt_bias=dweights.dt_bias)
    if device.name() == "cpu":
        of_inputs = projected, weights, heads, cu_seqlens
        found = delta_rule_inputs_backward_ref(gradients, *of_inputs, dprojected, prefixes)
        if dweights is not None:
            for total, part in zip(dweights, found, strict=True):
                total += part
        return
    empty, channels, value_heads = device.xp().empty, heads.channels, heads.value_heads
    units, tiles = 2 * heads.key_heads + value_heads, -(-count // TOKENS)
    partials = empty((tiles, TAPS * channels), np.float32)
    gate_partials = empty((tiles, 2 * value_heads), np.float32)
    accesses = accesses_of(heads, weights.conv, projected, dprojected, *gradients[:3])
    kernel = delta_rule_inputs_gradient_kernel(tuple(heads), dtype.name, accesses, prefixes is not None)
    sequences = PlainSequences(cu_seqlens) if prefixes is None else PrefixSequences(cu_seqlens, prefixes.parents)
    flat = gradients._replace(q=gradients.q.reshape(-1), k=gradients.k.reshape(-1), v=gradients.v.reshape(-1))
    arguments = projected.reshape(-1), weights.conv, sequences, flat, dprojected.reshape(-1)
    launch(kernel, -(-tiles * units // LINES), (32, LINES), *arguments, partials)
    if prefixes is not None:
        kernel = last_rows_gradient_kernel(tuple(heads), dtype.name, accesses)
        launch(kernel, (units, len(cu_seqlens) - 1), (32, CHILD_LINES), *arguments)
    grid = tiles, -(-value_heads // 32)
    arguments = projected, weights, gradients, heads.gates, dprojected, gate_partials
    launch(gates_gradient_kernel, grid, (32, GATE_LINES), *arguments)
    if dweights is not None and count:
        add_partials(partials, dweights.conv.reshape(-1))
        totals = device.xp().zeros(2 * value_heads, np.float32)
        add_partials(gate_partials, totals)
        accumulate(totals[:value_heads], dweights.a_log)
        accumulate(totals[value_heads:], dweights.dt_bias)


def _packed_taps(x, cu_seqlens, prefixes=None):
    """(N, 4, channels): for each token the rows from three before it to its own, zero before its sequence's first.

    With PackedPrefixes a sequence's own rows come after its parent's last ones, of which there are three or more.
    """
    count = len(x)
    parents = None if prefixes is None else np.repeat(prefixes.parents, np.diff(cu_seqlens))
    positions = np.arange(count) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    taps = np.zeros((count, TAPS, x.shape[1]), x.dtype)
    for tap in range(TAPS):
        back = TAPS - 1 - tap
        inside = positions >= back
        taps[inside, tap] = x[np.flatnonzero(inside) - back]
        if parents is not None:
            first = np.flatnonzero(~inside & (parents >= 0))
            taps[first, tap] = x[cu_seqlens[parents[first] + 1] + positions[first] - back]
    return taps


def _paged_taps(x, sequences, cache):
    """_packed_taps of new tokens; the cache is read, and then has the last of them and the rows before boundaries."""
    taps, bounds = np.zeros((len(x), TAPS, x.shape[1]), x.dtype), sequences.cu_seqlens
    for b, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if sequences.context_lens[b] == 0:
            continue
        start, slot = sequences.context_lens[b] - (end - begin), sequences.slots[b]
        state_len = start if start == sequences.resumed_at[b] else max(start - 1, 0) // BLOCK * BLOCK
        rows, table = cache.rows[slot], sequences.state_tables[b]
        before = np.zeros((TAPS - 1, x.shape[1]), x.dtype)
        positions = start - (TAPS - 1) + np.arange(TAPS - 1)
        resumed_at = sequences.resumed_at[b]
        for i, position in enumerate(positions):
            if 0 <= position < resumed_at:
                before[i] = cache.page_rows[table[resumed_at // BLOCK - 1], position - resumed_at + TAPS - 1]
            elif position >= 0:
                before[i] = rows[position % len(rows)]
        whole = np.concatenate([before, x[begin:end]])
        for tap in range(TAPS):
            taps[begin:end, tap] = whole[tap : tap + end - begin]
        for position in range(-(-start // BLOCK) * BLOCK, start + end - begin, BLOCK):
            if position > state_len and table[position // BLOCK - 1] >= 0:
                cache.page_rows[table[position // BLOCK - 1]] = taps[begin + position - start, : TAPS - 1]
        last = np.arange(max(begin, end - len(rows)), end)
        rows[(start + last - begin) % len(rows)] = x[last]
    return taps


def _activations(taps, conv, dtype):
    """(u, y) (N, channels): the convolution and its SiLU, each rounded to a dtype."""
    u = np.zeros((len(taps), taps.shape[2]), taps.dtype)
    for tap in range(TAPS):
        u = u + conv[:, tap] * taps[:, tap]
    u = u.astype(dtype)
    with np.errstate(over="ignore"):
        return u, (u / (1 + np.exp(-u))).astype(dtype)


def _by_head(array, heads):
    """(q, k, v) of the channels, a head an axis."""
    keys = heads.key_heads * heads.key_dim
    shapes = (heads.key_heads, heads.key_dim), (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
    parts = array[:, :keys], array[:, keys : 2 * keys], array[:, 2 * keys : heads.channels]
    return tuple(part.reshape(len(array), *shape) for part, shape in zip(parts, shapes, strict=True))


def _gates(projected, weights, heads):
    """(beta, the unbounded log_decay, a + dt_bias), each (N, HV)."""
    b, a = np.split(projected[:, heads.gates :], 2, axis=1)
    shifted = a + weights.dt_bias
    with np.errstate(over="ignore"):
        beta = 1 / (1 + np.exp(-b))
    softplus_of = np.maximum(shifted, 0) + np.log1p(np.exp(-np.abs(shifted)))
    return beta, -np.exp(weights.a_log) * softplus_of, shifted


def _tokens_of(projected, taps, weights, heads):
    """Tokens in the precision of projected, from the taps of each token."""
    _, y = _activations(taps, weights.conv, projected.dtype)
    q, k, v = _by_head(y, heads)
    inverse_q, inverse_k = (1 / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPS) for x in (q, k))
    beta, log_decay, _ = _gates(projected, weights, heads)
    return Tokens(q * inverse_q * heads.key_dim**-0.5, k * inverse_k, v, beta, np.maximum(log_decay, LEAST_LOG_DECAY))


def delta_rule_inputs_ref(projected, weights, heads, cu_seqlens):
    """Tokens of packed sequences, in the precision of projected."""
    return _tokens_of(projected, _packed_taps(projected[:, : heads.channels], cu_seqlens), weights, heads)


def delta_rule_inputs_backward_ref(gradients, projected, weights, heads, cu_seqlens, dprojected, prefixes=None):
    """InputWeights of gradients, in the precision of projected; dprojected is written, but for z."""
    taps = _packed_taps(projected[:, : heads.channels], cu_seqlens, prefixes)
    u, y = _activations(taps, weights.conv, projected.dtype)
    dy = []
    for x, dout, scale in zip(_by_head(y, heads), gradients[:3], (heads.key_dim**-0.5, 1.0, None), strict=True):
        if scale is None:
            dy.append(dout)
            continue
        inverse = 1 / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPS)
        dy.append(scale * inverse * (dout - x * inverse**2 * np.sum(x * dout, axis=-1, keepdims=True)))
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-u))
    du = np.concatenate([part.reshape(len(u), -1) for part in dy], axis=1) * s * (1 + u * (1 - s))
    dx = np.zeros_like(du)
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        for i in range(min(TAPS, end - begin)):
            dx[begin : end - i] += weights.conv[:, TAPS - 1 - i] * du[begin + i : end]
    for sequence, parent in enumerate(() if prefixes is None else prefixes.parents):
        # What a sequence's first rows read of its parent's last ones, child by child.
        begin, end, before = *cu_seqlens[sequence : sequence + 2], cu_seqlens[parent + 1]
        for i in range(1, TAPS if parent >= 0 else 1):
            rows = min(i, end - begin)
            dx[before - i : before - i + rows] += weights.conv[:, TAPS - 1 - i] * du[begin : begin + rows]
    dprojected[:, : heads.channels] = dx
    beta, log_decay, shifted = _gates(projected, weights, heads)
    inside = log_decay >= LEAST_LOG_DECAY
    with np.errstate(over="ignore"):
        da = np.where(inside, -gradients.log_decay * np.exp(weights.a_log) / (1 + np.exp(-shifted)), 0)
    dprojected[:, heads.gates :] = np.concatenate([gradients.beta * beta * (1 - beta), da], axis=1)
    of_a_log = np.sum(np.where(inside, gradients.log_decay * log_decay, 0), axis=0)
    return InputWeights(np.einsum("nc,njc->cj", du, taps), of_a_log, np.sum(da, axis=0))
