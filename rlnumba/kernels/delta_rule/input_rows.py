"""The forward's kernel of delta_rule_inputs, and its parts, which decode has in common with it.

A head's channels of a token are shared by a warp: a lane has `lane_width` neighbouring ones, which it loads at once. A
sum over a head is a chain over a lane's channels, then a butterfly of the warp. inputs.py has the equations.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LEAST_LOG_DECAY, LOG2_E
from rlnumba.kernels.delta_rule.simt import state_blocks
from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx.warp import (
    PTX_TYPES,
    access_length,
    cvt_pack,
    cvt_unpack,
    device_function,
    exp2,
    inverse_sqrt,
    narrow,
    vector_access,
    warp_sum,
    widen,
)
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize

TAPS = 4
EPS = np.float32(1e-6)
# Warps of a block, each with a head of a tile of tokens; rows that a warp loads before it uses the first.
LINES, AHEAD = 4, 4


class DeltaRuleHeads(NamedTuple):
    """Sizes of the heads of linear attention, and where a row of the projection has what."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self):
        """Columns of q, k and v, which the convolution reads: the first ones."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self):
        """Columns of v, and of z, which come after the channels."""
        return self.value_heads * self.value_dim

    @property
    def gates(self):
        """The column of the first b; the value heads' a come after their b."""
        return self.channels + self.values

    @property
    def columns(self):
        return self.gates + 2 * self.value_heads


@device_function
def sequence_of(cu_seqlens, t):
    """The sequence of packed token t: the last that begins at or before it."""
    low, high = 0, cu_seqlens.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if cu_seqlens[middle] <= t:
            low = middle
        else:
            high = middle
    return low


@device_function
def rounded(value, array):
    """A float32 rounded to the dtype of an array, as float32."""
    return widen(narrow(value, array))


@device_function
def softplus(value):
    """log(1 + exp(value)), by an exponential that does not overflow."""
    return max(value, np.float32(0.0)) + np.float32(math.log1p(exp2(-abs(value) * LOG2_E)))


@device_function
def log_decay_of(a, a_log, dt_bias):
    """log_decay before its bound, of one value head."""
    return -exp2(a_log * LOG2_E) * softplus(a + dt_bias)


def lane_width(dim):
    """Neighbouring channels of a head that a lane has: the smallest divisor of dim that leaves at most 32 lanes."""
    return next(width for width in range(-(-dim // 32), dim + 1) if dim % width == 0)


def accesses_of(heads, conv, *arrays):
    """Elements that one access may move: of a head of q or k, of a head of v, and of a channel's taps.

    conv: the weights; arrays: all that are read or written a head at a time.
    """
    common = math.gcd(heads.columns, heads.channels)
    of_key = access_length(math.gcd(common, lane_width(heads.key_dim)), *arrays)
    of_value = math.gcd(common, 2 * heads.key_heads * heads.key_dim, lane_width(heads.value_dim))
    return of_key, access_length(of_value, *arrays), access_length(TAPS, conv)


@functools.cache
def round_function(count, element):
    """The device function that rounds values[:count] to the dtype named `element`, 16 bits two at a time."""
    pack, unpack = (cvt_pack(element), cvt_unpack(element)) if element in PTX_TYPES else (None, None)

    @device_function
    def round_values(values):
        for i in range(0, count, 2):
            other = i + 1 if i + 1 < count else i
            low, high = unpack(pack(values[i], values[other]))
            values[other] = high
            values[i] = low

    @device_function
    def keep_values(values):
        pass

    return round_values if element in PTX_TYPES else keep_values


@functools.cache
def row_functions(dim, element, access, tap_access):
    """(load, store, load_taps, convolve, activations, inverse_length): the device functions of a head's channels in a
    lane."""
    width, zero = lane_width(dim), np.float32(0.0)
    load, store = vector_access(width, access)
    load_four, _ = vector_access(TAPS, tap_access)
    round_values = round_function(width, element)

    @device_function
    def load_taps(conv, channel, taps):
        """taps[4 i : 4 i + 4] = the weights of a lane's channel i; channel: its first."""
        for i in range(width):
            load_four(conv[channel + i], 0, taps, i * TAPS)

    @device_function
    def convolve(window, taps, values):
        """values = the convolution, rounded, of the token of the window's row 3, after three rows before it."""
        for i in range(width):
            total = cuda.fma(taps[4 * i], window[i], zero)
            for tap in range(1, TAPS):
                total = cuda.fma(taps[4 * i + tap], window[tap * width + i], total)
            values[i] = total
        round_values(values)

    @device_function
    def activations(window, taps, values):
        """values = the activations of the same token."""
        convolve(window, taps, values)
        for i in range(width):
            values[i] = values[i] * sigmoid(values[i])
        round_values(values)

    @device_function
    def inverse_length(values, lane):
        """1 / the length of a head of q or k, whose channels the warp has in `values`."""
        squares = zero
        for i in range(width):
            squares = cuda.fma(values[i], values[i], squares)
        return inverse_sqrt(warp_sum(squares if lane * width < dim else zero) + EPS)

    return load, store, load_taps, convolve, activations, inverse_length


@device_function
def gates_of(b, a, a_log, dt_bias, projected):
    """(beta, log_decay) of a value head of a token; projected: an array of the model's dtype."""
    return rounded(sigmoid(b), projected), max(log_decay_of(a, a_log, dt_bias), LEAST_LOG_DECAY)


@functools.cache
def head_function(heads, element, is_value, is_paged, has_prefixes, access, tap_access):
    """The device function of a head of q or k, or of v, for all tokens of a tile."""
    key_heads, dim = heads.key_heads, heads.value_dim if is_value else heads.key_dim
    width, query_scale, zero = lane_width(dim), np.float32(heads.key_dim**-0.5), np.float32(0.0)
    rows, columns, first_value = TAPS - 1 + AHEAD, heads.columns, 2 * key_heads
    window_size, taps_size = rows * width, TAPS * width
    load, store, load_taps, _, activations, inverse_length = row_functions(dim, element, access, tap_access)
    any_value = is_value or heads.key_dim == heads.value_dim

    @device_function
    def load_before(window, projected, sequences, cache, b, t, begin, start, resumed_at, channel):
        """The three rows before token t of sequence b: packed, its parent's, of the cache, or zeros before it."""
        for tap in range(TAPS - 1):
            row = t - (TAPS - 1) + tap
            before = start + row - begin
            if row >= begin:
                load(projected, row * columns + channel, window, tap * width)
            elif has_prefixes and sequences.parents[b] >= 0:
                of_parent = sequences.cu_seqlens[sequences.parents[b] + 1] + row - begin
                load(projected, of_parent * columns + channel, window, tap * width)
            elif is_paged and before >= 0:
                if before < resumed_at:
                    source = sequences.state_tables[b, resumed_at // BLOCK - 1]
                    page_row = cache.page_rows[source, before - resumed_at + TAPS - 1]
                    load(page_row, channel, window, tap * width)
                else:
                    slot_row = cache.rows[sequences.slots[b], before % cache.rows.shape[1]]
                    load(slot_row, channel, window, tap * width)
            else:
                for j in range(width):
                    window[tap * width + j] = zero

    @device_function
    def compute_token(window, taps, values, tokens, t, unit, lane, is_stored):
        """A token's head, from the window's first rows."""
        activations(window, taps, values)
        if any_value and unit >= first_value:
            if is_stored:
                place = (t * heads.value_heads + unit - first_value) * dim + lane * width
                store(tokens.v, place, values, 0)
        if not is_value and unit < first_value:
            factor = inverse_length(values, lane)
            if unit < key_heads:
                factor = factor * query_scale
            for j in range(width):
                values[j] = values[j] * factor
            if is_stored and unit < key_heads:
                store(tokens.q, (t * key_heads + unit) * dim + lane * width, values, 0)
            if is_stored and unit >= key_heads:
                store(tokens.k, (t * key_heads + unit - key_heads) * dim + lane * width, values, 0)

    @device_function
    def compute_head(projected, conv, sequences, cache, tokens, unit, first_token, stop, first, lane):
        """Tokens first_token .. stop - 1; first: the head's first channel. projected, q, k and v with one axis."""
        window, taps, values = (
            cuda.local.array(window_size, np.float32),
            cuda.local.array(taps_size, np.float32),
            cuda.local.array(width, np.float32),
        )
        owned = lane * width < dim
        channel = first + (lane * width if owned else 0)
        load_taps(conv, channel, taps)
        begin, end, start, resumed_at, state_len, b, is_stored = 0, -1, 0, -1, 0, 0, owned
        for i in range(AHEAD):
            if first_token + i < stop:
                load(projected, (first_token + i) * columns + channel, window, (TAPS - 1 + i) * width)
        for t in range(first_token, stop):
            if t >= end:
                b = sequence_of(sequences.cu_seqlens, t)
                begin, end = sequences.cu_seqlens[b], sequences.cu_seqlens[b + 1]
                if is_paged:
                    start, resumed_at = sequences.context_lens[b] - (end - begin), sequences.resumed_at[b]
                    is_stored = owned and sequences.context_lens[b] > 0
                    state_len = state_blocks(start, resumed_at) * BLOCK
                load_before(window, projected, sequences, cache, b, t, begin, start, resumed_at, channel)
            position = start + t - begin
            # The page of a boundary also keeps the rows before it.
            if is_paged and is_stored and position > state_len and position % BLOCK == 0:
                page = sequences.state_tables[b, position // BLOCK - 1]
                # Of boundaries with one page the last writes it: those of other tiles are at no known time.
                for later in range(position // BLOCK, (start + end - begin - 1) // BLOCK):
                    page = -1 if sequences.state_tables[b, later] == page else page
                if page >= 0:
                    for tap in range(TAPS - 1):
                        store(cache.page_rows[page, tap], channel, window, tap * width)
            compute_token(window, taps, values, tokens, t, unit, lane, is_stored)
            for i in range((rows - 1) * width):
                window[i] = window[i + width]
            if t + AHEAD < stop:
                load(projected, (t + AHEAD) * columns + channel, window, (rows - 1) * width)

    return compute_head


@specialize
def delta_rule_inputs_kernel(heads, element, is_paged, accesses, has_prefixes=False):
    """The kernel for DeltaRuleHeads (a tuple) of a dtype's name; is_paged: earlier tokens are in a ConvCache;
    has_prefixes: for PrefixSequences."""
    heads = DeltaRuleHeads(*heads)
    key_heads, key_dim, value_dim, value_heads = heads.key_heads, heads.key_dim, heads.value_dim, heads.value_heads
    units, keys, gates, columns = 2 * key_heads + value_heads, key_heads * key_dim, heads.gates, heads.columns
    same_dim = key_dim == value_dim
    of_key = head_function(heads, element, False, is_paged, has_prefixes, accesses[0], accesses[2])
    of_value = head_function(heads, element, True, is_paged, has_prefixes, accesses[1], accesses[2])

    @cuda.jit
    def delta_rule_inputs_kernel(projected, weights, sequences, cache, tokens, tile):
        """A warp owns a head of q, k or v of `tile` tokens, at most 32; that of v their gates, too, a token a lane.

        projected, q, k and v have one axis.
        """
        index, lane = cuda.blockIdx.x * LINES + cuda.threadIdx.y, cuda.threadIdx.x
        first_token, unit = index // units * tile, index % units
        stop = min(first_token + tile, sequences.cu_seqlens[sequences.cu_seqlens.shape[0] - 1])
        if first_token >= stop:
            return
        head = unit - 2 * key_heads
        if head >= 0 and first_token + lane < stop:
            t = first_token + lane
            row = t * columns + gates
            b, a = widen(projected[row + head]), widen(projected[row + value_heads + head])
            beta, log_decay = gates_of(b, a, widen(weights.a_log[head]), widen(weights.dt_bias[head]), projected)
            tokens.beta[t, head] = beta
            tokens.log_decay[t, head] = log_decay
        if same_dim or head < 0:
            first = unit * key_dim
            of_key(projected, weights.conv, sequences, cache, tokens, unit, first_token, stop, first, lane)
        else:
            first = 2 * keys + head * value_dim
            of_value(projected, weights.conv, sequences, cache, tokens, unit, first_token, stop, first, lane)

    return delta_rule_inputs_kernel
