"""The kernels of the gradient of delta_rule_inputs, whose equations inputs.py has: of the channels, and of the gates.

A warp has a head of q, k or v of a tile of tokens, as in the forward. What a convolution reads of a parent's rows
(prefixes, arithmetic.py) is added up by a kernel of its own, which writes these rows anew.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import LEAST_LOG_DECAY, LOG2_E, has_children, next_child
from rlnumba.kernels.delta_rule.input_rows import (
    EPS,
    LINES,
    TAPS,
    DeltaRuleHeads,
    lane_width,
    log_decay_of,
    round_function,
    rounded,
    row_functions,
    sequence_of,
)
from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx.warp import device_function, exp2, inverse_sqrt, narrow, warp_sum, widen
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize

# Tokens of a tile of the backward, and its threads.
TOKENS, THREADS = 64, 128
# Warps of a block of the gates' gradient, and tokens of each.
GATE_LINES = 8
GATE_TOKENS = TOKENS // GATE_LINES
# Rows that its warps load before they use the first: one more takes more registers than four blocks have.
NEXT = 2
# Warps of a block of last_rows_gradient_kernel, each with every so many-th child of a sequence.
CHILD_LINES = 8


class HeadFunctions(NamedTuple):
    """The device functions of a token of a head of q or k, or of v, and the sizes that they close over.

    load, store, load_taps: of row_functions; load_gradient(gradients, t, unit, e, douts, at); compute_du(window, taps,
    douts, du, values, sigmoids, unit, owned).
    """

    dim: int
    width: int
    columns: int
    load: object
    store: object
    load_taps: object
    load_gradient: object
    compute_du: object


@functools.cache
def head_functions(heads, element, is_value, access, tap_access):
    """The HeadFunctions of v, or of q and k."""
    key_heads, dim = heads.key_heads, heads.value_dim if is_value else heads.key_dim
    width, query_scale, zero, one = lane_width(dim), np.float32(heads.key_dim**-0.5), np.float32(0.0), np.float32(1.0)
    first_value, any_value = 2 * key_heads, is_value or heads.key_dim == heads.value_dim
    load, store, load_taps, convolve, _, _ = row_functions(dim, element, access, tap_access)
    round_values = round_function(width, element)

    @device_function
    def load_gradient(gradients, t, unit, e, douts, at):
        if any_value and unit >= first_value:
            load(gradients.v, (t * heads.value_heads + unit - first_value) * dim + e, douts, at)
        if not is_value and unit < key_heads:
            load(gradients.q, (t * key_heads + unit) * dim + e, douts, at)
        if not is_value and key_heads <= unit < first_value:
            load(gradients.k, (t * key_heads + unit - key_heads) * dim + e, douts, at)

    @device_function
    def compute_du(window, taps, douts, du, values, sigmoids, unit, owned):
        """du of the token of the window's row 3; values, sigmoids: scratch."""
        convolve(window, taps, du)
        for i in range(width):
            sigmoids[i] = sigmoid(du[i])
            values[i] = du[i] * sigmoids[i]
        round_values(values)
        scale, removed = one, zero
        if not is_value and unit < first_value:
            squares, product = zero, zero
            for i in range(width):
                squares, product = cuda.fma(values[i], values[i], squares), cuda.fma(values[i], douts[i], product)
            inverse = inverse_sqrt(warp_sum(squares if owned else zero) + EPS)
            scale = inverse * query_scale if unit < key_heads else inverse
            removed = inverse * inverse * warp_sum(product if owned else zero)
        for i in range(width):
            s = sigmoids[i]
            dy = douts[i] if any_value and unit >= first_value else scale * (douts[i] - values[i] * removed)
            du[i] = dy * s * (one + du[i] * (one - s))

    return HeadFunctions(dim, width, heads.columns, load, store, load_taps, load_gradient, compute_du)


def of_both_dims(heads, element, accesses):
    """The HeadFunctions of q and k, and those of v."""
    return [head_functions(heads, element, is_value, accesses[is_value], accesses[2]) for is_value in (False, True)]


@functools.cache
def gradient_function(functions, has_prefixes):
    """compute_gradient: the device function of the gradient of a tile's tokens of a head."""
    dim, width, columns, load, store, load_taps, load_gradient, compute_du = functions
    zero, taps_size, rows = np.float32(0.0), TAPS * width, TAPS - 1 + NEXT
    window_size, ahead_size = rows * width, NEXT * width

    @device_function
    def compute_gradient(projected, conv, sequences, gradients, dprojected, sums, unit, first_token, first, lane):
        """Tokens first_token .. first_token + TOKENS - 1, and du of those after them; first: the first channel."""
        cu_seqlens = sequences.cu_seqlens
        window, taps, douts, pending, du, values, sigmoids = (
            cuda.local.array(window_size, np.float32),
            cuda.local.array(taps_size, np.float32),
            cuda.local.array(ahead_size, np.float32),
            cuda.local.array(taps_size, np.float32),
            cuda.local.array(width, np.float32),
            cuda.local.array(width, np.float32),
            cuda.local.array(width, np.float32),
        )
        owned = lane * width < dim
        e = lane * width if owned else 0
        channel, count = first + e, cu_seqlens[cu_seqlens.shape[0] - 1]
        stop = min(first_token + TOKENS, count)
        limit = min(stop + TAPS - 1, count)
        load_taps(conv, channel, taps)
        begin, end = 0, -1
        for i in range(taps_size):
            pending[i], sums[i] = zero, zero
        for i in range(NEXT):
            if first_token + i < limit:
                load(projected, (first_token + i) * columns + channel, window, (TAPS - 1 + i) * width)
                load_gradient(gradients, first_token + i, unit, e, douts, i * width)
        for t in range(first_token, stop + TAPS - 1):
            if t < limit:
                if t >= end:
                    b = sequence_of(cu_seqlens, t)
                    begin, end = cu_seqlens[b], cu_seqlens[b + 1]
                    for tap in range(TAPS - 1):
                        row = t - (TAPS - 1) + tap
                        if row >= begin:
                            load(projected, row * columns + channel, window, tap * width)
                        elif has_prefixes and sequences.parents[b] >= 0:
                            of_parent = cu_seqlens[sequences.parents[b] + 1] + row - begin
                            load(projected, of_parent * columns + channel, window, tap * width)
                        else:
                            for i in range(width):
                                window[tap * width + i] = zero
                compute_du(window, taps, douts, du, values, sigmoids, unit, owned)
                # pending: dx of this token and of the three before it, as far as they are of its sequence.
                for back in range(TAPS):
                    for i in range(width):
                        if t - back >= begin:
                            at = back * width + i
                            pending[at] = cuda.fma(taps[4 * i + TAPS - 1 - back], du[i], pending[at])
                if t < stop:
                    for tap in range(TAPS):
                        for i in range(width):
                            sums[4 * i + tap] = cuda.fma(du[i], window[tap * width + i], sums[4 * i + tap])
            if t - (TAPS - 1) >= first_token and owned:
                store(dprojected, (t - (TAPS - 1)) * columns + channel, pending, (TAPS - 1) * width)
            for i in range((TAPS - 1) * width):
                at = taps_size - 1 - i
                pending[at] = pending[at - width]
            for i in range(width):
                pending[i] = zero
            for i in range((rows - 1) * width):
                window[i] = window[i + width]
            for i in range((NEXT - 1) * width):
                douts[i] = douts[i + width]
            if t + NEXT < limit:
                load(projected, (t + NEXT) * columns + channel, window, (rows - 1) * width)
                load_gradient(gradients, t + NEXT, unit, e, douts, (NEXT - 1) * width)

    return compute_gradient


@functools.cache
def row_function(functions, distance):
    """The device function that adds what a row has of dx to the totals of a parent's last three rows.

    distance: of the row from the first of these three; they are less than 3, a child's rows 3 and more.
    """
    width, before, compute_du = functions.width, TAPS - 1, functions.compute_du

    @device_function
    def add_row(window, taps, douts, totals, du, values, sigmoids, unit, owned):
        """The row is the window's fourth; then window and douts go on to the next one."""
        compute_du(window, taps, douts, du, values, sigmoids, unit, owned)
        for row in range(before):
            if 0 <= distance - row < TAPS:
                for i in range(width):
                    at = row * width + i
                    totals[at] = cuda.fma(taps[4 * i + TAPS - 1 - (distance - row)], du[i], totals[at])
        for i in range((2 * before - 1) * width):
            window[i] = window[i + width]
        for i in range((before - 1) * width):
            douts[i] = douts[i + width]

    return add_row


@functools.cache
def last_rows_function(functions):
    """compute_last_rows: the device function of what a warp has of dx of a parent's last three rows, of a head."""
    dim, width, columns, load, _, load_taps, load_gradient, _ = functions
    before, taps_size, zero = TAPS - 1, TAPS * width, np.float32(0.0)
    before_size, both_size = before * width, 2 * before * width
    own_0, own_1, own_2, of_child_0, of_child_1, of_child_2 = (
        row_function(functions, row) for row in range(2 * before)
    )

    @device_function
    def compute_last_rows(projected, conv, sequences, gradients, totals, b, unit, first, line, lane):
        """totals: of the children of sequence b that warp `line` has, in the first one behind b's own rows."""
        window, taps, douts, last_rows, du, values, sigmoids = (
            cuda.local.array(both_size, np.float32),
            cuda.local.array(taps_size, np.float32),
            cuda.local.array(before_size, np.float32),
            cuda.local.array(before_size, np.float32),
            cuda.local.array(width, np.float32),
            cuda.local.array(width, np.float32),
            cuda.local.array(width, np.float32),
        )
        cu_seqlens, parents = sequences.cu_seqlens, sequences.parents
        owned = lane * width < dim
        e = lane * width if owned else 0
        channel, end = first + e, cu_seqlens[b + 1]
        load_taps(conv, channel, taps)
        for row in range(before):
            load(projected, (end - before + row) * columns + channel, last_rows, row * width)
        for i in range(before_size):
            totals[i] = zero
        if line == 0:
            for row in range(before):
                load(projected, (end - 2 * before + row) * columns + channel, window, row * width)
                load_gradient(gradients, end - before + row, unit, e, douts, row * width)
            for i in range(before_size):
                window[before_size + i] = last_rows[i]
            own_0(window, taps, douts, totals, du, values, sigmoids, unit, owned)
            own_1(window, taps, douts, totals, du, values, sigmoids, unit, owned)
            own_2(window, taps, douts, totals, du, values, sigmoids, unit, owned)
        number, child = 0, next_child(parents, b, b + 1)
        while child >= 0:
            if number % CHILD_LINES == line:
                begin, count = cu_seqlens[child], cu_seqlens[child + 1] - cu_seqlens[child]
                for i in range(before_size):
                    window[i] = last_rows[i]
                for row in range(before):
                    if row < count:
                        load(projected, (begin + row) * columns + channel, window, before_size + row * width)
                        load_gradient(gradients, begin + row, unit, e, douts, row * width)
                if count > 0:
                    of_child_0(window, taps, douts, totals, du, values, sigmoids, unit, owned)
                if count > 1:
                    of_child_1(window, taps, douts, totals, du, values, sigmoids, unit, owned)
                if count > 2:
                    of_child_2(window, taps, douts, totals, du, values, sigmoids, unit, owned)
            number, child = number + 1, next_child(parents, b, child + 1)

    return compute_last_rows


@specialize
def delta_rule_inputs_gradient_kernel(heads, element, accesses, has_prefixes=False):
    """The kernel of dx and dconv, for DeltaRuleHeads (a tuple) of a dtype's name; has_prefixes: for PrefixSequences."""
    heads = DeltaRuleHeads(*heads)
    key_heads, key_dim, value_dim = heads.key_heads, heads.key_dim, heads.value_dim
    units, keys, same_dim = 2 * key_heads + heads.value_heads, key_heads * key_dim, key_dim == value_dim
    of_key, of_value = (gradient_function(each, has_prefixes) for each in of_both_dims(heads, element, accesses))
    key_width, value_width = lane_width(key_dim), lane_width(value_dim)
    size = TAPS * max(key_width, value_width)

    @cuda.jit(launch_bounds=(THREADS, 4))
    def delta_rule_inputs_gradient_kernel(projected, conv, sequences, gradients, dprojected, partials):
        """A warp owns a head of q, k or v of a tile of TOKENS tokens; a lane neighbouring channels.

        projected, dprojected and gradients' q, k and v have one axis; partials (tiles, channels * 4) of dconv.
        """
        sums = cuda.local.array(size, np.float32)
        index, lane = cuda.blockIdx.x * LINES + cuda.threadIdx.y, cuda.threadIdx.x
        tile, unit = index // units, index % units
        if tile >= partials.shape[0]:
            return
        first_token, head = tile * TOKENS, unit - 2 * key_heads
        if same_dim or head < 0:
            first, dim, width = unit * key_dim, key_dim, key_width
            of_key(projected, conv, sequences, gradients, dprojected, sums, unit, first_token, first, lane)
        else:
            first, dim, width = 2 * keys + head * value_dim, value_dim, value_width
            of_value(projected, conv, sequences, gradients, dprojected, sums, unit, first_token, first, lane)
        for i in range(size):
            if lane * width + i // TAPS < dim and i < TAPS * width:
                partials[tile, TAPS * (first + lane * width) + i] = sums[i]

    return delta_rule_inputs_gradient_kernel


@specialize
def last_rows_gradient_kernel(heads, element, accesses):
    """The kernel of dx of the last rows of sequences with children, for DeltaRuleHeads (a tuple) of a dtype's name."""
    heads = DeltaRuleHeads(*heads)
    key_heads, key_dim, value_dim = heads.key_heads, heads.key_dim, heads.value_dim
    keys, same_dim, columns, before = key_heads * key_dim, key_dim == value_dim, heads.columns, TAPS - 1
    of_key, of_value = (last_rows_function(each) for each in of_both_dims(heads, element, accesses))
    key_width, value_width = lane_width(key_dim), lane_width(value_dim)
    size, most = before * max(key_width, value_width), before * max(key_dim, value_dim)

    @cuda.jit(launch_bounds=(32 * CHILD_LINES, 1))
    def last_rows_gradient_kernel(projected, conv, sequences, gradients, dprojected):
        """A block owns a head of q, k or v of a sequence; a warp every CHILD_LINES-th child, in ascending order.

        Arrays are those of delta_rule_inputs_gradient_kernel, which has written less of these rows. A thread adds the
        warps' sums of a channel in ascending order.
        """
        sums, totals = cuda.shared.array((CHILD_LINES, most), np.float32), cuda.local.array(size, np.float32)
        unit, b, lane, line = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x, cuda.threadIdx.y
        if not has_children(sequences.parents, b):
            return
        head, end = unit - 2 * key_heads, sequences.cu_seqlens[b + 1]
        if same_dim or head < 0:
            first, dim, width = unit * key_dim, key_dim, key_width
            of_key(projected, conv, sequences, gradients, totals, b, unit, first, line, lane)
        else:
            first, dim, width = 2 * keys + head * value_dim, value_dim, value_width
            of_value(projected, conv, sequences, gradients, totals, b, unit, first, line, lane)
        for i in range(size):
            if i < before * width and lane * width < dim:
                sums[line, i // width * dim + lane * width + i % width] = totals[i]
        cuda.syncthreads()
        for i in range(line * 32 + lane, before * dim, 32 * CHILD_LINES):
            total = sums[0, i]
            for other in range(1, CHILD_LINES):
                total += sums[other, i]
            dprojected[(end - before + i // dim) * columns + first + i % dim] = narrow(total, dprojected)

    return last_rows_gradient_kernel


@cuda.jit(launch_bounds=(32 * GATE_LINES, 2))
def gates_gradient_kernel(projected, weights, gradients, column, dprojected, partials):
    """db and da, and partials (tiles, 2 HV) of [dA_log | ddt_bias]; column: of the first b.

    A block has 32 value heads of a tile of tokens, a lane each; a warp every GATE_LINES-th token, all of which are
    loaded at once. The sums go over the tile's tokens in ascending order.
    """
    of_decay = cuda.shared.array((TOKENS, 32), np.float32)
    decays, of_shift = cuda.shared.array((TOKENS, 32), np.float32), cuda.shared.array((TOKENS, 32), np.float32)
    lane, line, heads = cuda.threadIdx.x, cuda.threadIdx.y, weights.a_log.shape[0]
    first, zero, one = cuda.blockIdx.x * TOKENS, np.float32(0.0), np.float32(1.0)
    is_head = cuda.blockIdx.y * 32 + lane < heads
    head = cuda.blockIdx.y * 32 + lane if is_head else heads - 1
    stop = min(TOKENS, projected.shape[0] - first)
    b, a, dbeta, dlog_decay = (
        cuda.local.array(GATE_TOKENS, np.float32),
        cuda.local.array(GATE_TOKENS, np.float32),
        cuda.local.array(GATE_TOKENS, np.float32),
        cuda.local.array(GATE_TOKENS, np.float32),
    )
    for i in range(GATE_TOKENS):
        t = first + min(i * GATE_LINES + line, stop - 1)
        b[i], a[i] = widen(projected[t, column + head]), widen(projected[t, column + heads + head])
        dbeta[i], dlog_decay[i] = gradients.beta[t, head], gradients.log_decay[t, head]
    a_log, dt_bias = widen(weights.a_log[head]), widen(weights.dt_bias[head])
    for i in range(GATE_TOKENS):
        row = i * GATE_LINES + line
        t, beta = first + row, rounded(sigmoid(b[i]), projected)
        log_decay, da, a_gradient = log_decay_of(a[i], a_log, dt_bias), zero, zero
        if log_decay >= LEAST_LOG_DECAY:
            a_gradient = dlog_decay[i]
            da = -a_gradient * exp2(a_log * LOG2_E) * sigmoid(a[i] + dt_bias)
        else:
            # Where it is bounded it adds nothing.
            log_decay = zero
        of_decay[row, lane], decays[row, lane], of_shift[row, lane] = a_gradient, log_decay, da
        if row < stop and is_head:
            dprojected[t, column + head] = narrow(dbeta[i] * beta * (one - beta), dprojected)
            dprojected[t, column + heads + head] = narrow(da, dprojected)
    cuda.syncthreads()
    total = zero
    if line == 0:
        for row in range(stop):
            total = cuda.fma(of_decay[row, lane], decays[row, lane], total)
    if line == 1:
        for row in range(stop):
            total += of_shift[row, lane]
    if line < 2 and is_head:
        partials[cuda.blockIdx.x, line * heads + head] = total
