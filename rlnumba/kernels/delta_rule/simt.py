"""The gated delta rule without tensor cores, for any GPU, dtype and shape: float32 chains in a fixed order.

arithmetic.py has the equations and the order of the sums. A block of threads owns COLUMNS columns of V of one value
head of one sequence, whose state is in its shared memory, and goes through the tokens one by one: two warps, of which
one has the row w of a token and the other its output; all threads together have a row of M and P. Training, prefill and
decode are one kernel.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import unused
from rlnumba.kernels.delta_rule.arithmetic import (
    BLOCK,
    LARGEST_OPERAND,
    LOG2_E,
    LOW_SCALE,
    SUB_BLOCK,
    StateCache,
    StateSequences,
    scale_of,
)
from rlnumba.kernels.ptx.warp import device_function, exp2, narrow, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Columns of V of a block of threads, one a lane; threads, of which each has a token of the block in a row of M and P.
COLUMNS, THREADS = 32, BLOCK
# Floats from one row to the next in shared memory.
STRIDE = COLUMNS + 1


class BlockValues(NamedTuple):
    """Arrays for the backward: states (blocks, HV, K, V) at the begin of each block, errors r and rows w (N, HV, V).

    float32 and not scaled. Sequence b has the blocks from cu_seqlens[b] // BLOCK + b on.
    """

    states: object
    errors: object
    rows: object


@device_function
def decay_between(later, earlier):
    """exp(later - earlier) of two sums of log decays, later <= earlier."""
    return exp2((later - earlier) * LOG2_E)


@device_function
def state_blocks(start, resumed_at):
    """Blocks of a sequence, whose new tokens begin at position `start`, that the state has which is read."""
    return start // BLOCK if start == resumed_at or start == 0 else (start - 1) // BLOCK


@device_function
def saturated(value):
    """A float32 within the range of float16, but for NaN."""
    if value > LARGEST_OPERAND:
        value = LARGEST_OPERAND
    if value < -LARGEST_OPERAND:
        value = -LARGEST_OPERAND
    return value


@device_function
def as_operand(value, operands):
    """A float32 rounded to the dtype of `operands`, as float32; saturates, but for NaN."""
    return widen(narrow(saturated(value), operands))


@device_function
def dot_product(a, b, dim):
    """The chain over e of a[e] * b[e], two arrays with one axis."""
    total = np.float32(0.0)
    for e in range(dim):
        total = cuda.fma(widen(a[e]), widen(b[e]), total)
    return total


@specialize
def delta_rule_kernel(key_dim, is_half, is_paged, is_saved):
    """The kernel for heads of key_dim; is_half: operands are float16; is_saved: BlockValues are written."""
    scale, zero = scale_of(np.dtype(np.float16 if is_half else np.float32)), np.float32(0.0)
    unscaled, high_scale = np.float32(1.0) / scale, np.float32(1.0) / LOW_SCALE
    state_size, rows_size = key_dim * STRIDE, BLOCK * STRIDE

    @device_function
    def rounded(value, operands):
        return as_operand(value, operands) if is_half else value

    @device_function
    def key_element(k, key_rows, index, begin, slot, j, key_head, e):
        """Element e of key j of a block, whose row in k is `index`: one before the first new token is in the slot."""
        if is_paged and index < begin:
            return widen(key_rows[slot, j, key_head, e])
        return widen(k[index, key_head, e])

    @device_function
    def key_product(vector, k, key_rows, index, begin, slot, j, key_head):
        """The chain over e of vector[e] and key_element."""
        if is_paged and index < begin:
            return dot_product(vector, key_rows[slot, j, key_head], key_dim)
        return dot_product(vector, k[index, key_head], key_dim)

    @cuda.jit
    def delta_rule_kernel(tokens, sequences, cache, saved, out):
        """A block of threads: (sequence, value head, columns). The constants say which arguments are used."""
        state, rows = cuda.shared.array(state_size, np.float32), cuda.shared.array(rows_size, np.float32)
        sums, m, p = (
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
        )
        q, k, v = tokens.q, tokens.k, tokens.v
        b, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        lane, warp = thread % COLUMNS, thread // COLUMNS
        column = cuda.blockIdx.z * COLUMNS + lane
        owned, key_head = column < v.shape[2], head // (v.shape[1] // k.shape[1])
        begin, end = sequences.cu_seqlens[b], sequences.cu_seqlens[b + 1]
        block, filled, slot, page = 0, 0, 0, -1
        if begin == end:
            return
        if is_paged and sequences.context_lens[b] == 0:
            if owned:
                for t in range(begin, end):
                    out[t, head, column] = narrow(zero, out)
            return
        if is_paged:
            start, slot = sequences.context_lens[b] - (end - begin), sequences.slots[b]
            block = state_blocks(start, sequences.resumed_at[b])
            filled = start - block * BLOCK
            page = sequences.state_tables[b, block - 1] if block > 0 else -1
        for e in range(warp, key_dim, 2):
            value = zero
            if page >= 0 and owned:
                value = widen(cache.states[page, head, 0, e, column])
                if is_half:
                    value = cuda.fma(widen(cache.states[page, head, 1, e, column]), high_scale, value)
            state[e * STRIDE + lane] = value
        for j in range(warp, BLOCK, 2):
            rows[j * STRIDE + lane] = widen(cache.value_rows[slot, j, head, column]) if j < filled and owned else zero
        if thread < filled:
            sums[thread] = cache.decay_sums[slot, thread, head]
        cuda.syncthreads()
        for t in range(begin, end):
            if filled == BLOCK:
                m[thread] = decay_between(sums[BLOCK - 1], sums[thread])
                cuda.syncthreads()
                for j in range(warp, BLOCK, 2):
                    rows[j * STRIDE + lane] = rounded(m[j] * rows[j * STRIDE + lane], q)
                cuda.syncthreads()
                kept, page = decay_between(sums[BLOCK - 1], zero), -1
                if is_paged:
                    page = sequences.state_tables[b, block]
                for e in range(warp, key_dim, 2):
                    value = cuda.fma(kept, state[e * STRIDE + lane], zero)
                    for j in range(BLOCK):
                        key = key_element(k, cache.key_rows, t - BLOCK + j, begin, slot, j, key_head, e)
                        value = cuda.fma(key, rows[j * STRIDE + lane], value)
                    high, low = value, zero
                    if is_half:
                        high = rounded(value, q)
                        low = rounded((value - high) * LOW_SCALE, q)
                    state[e * STRIDE + lane] = cuda.fma(low, high_scale, high)
                    if page >= 0 and owned:
                        cache.states[page, head, 0, e, column] = narrow(high, cache.states)
                        if is_half:
                            cache.states[page, head, 1, e, column] = narrow(low, cache.states)
                cuda.syncthreads()
                for j in range(warp, BLOCK, 2):
                    rows[j * STRIDE + lane] = zero
                block += 1
                filled = 0
            if is_saved and filled == 0 and owned:
                for e in range(warp, key_dim, 2):
                    saved.states[begin // BLOCK + b + block, head, e, column] = state[e * STRIDE + lane] * unscaled
            if thread == 0:
                sums[filled] = (sums[filled - 1] if filled > 0 else zero) + tokens.log_decay[t, head]
            cuda.syncthreads()
            if thread <= filled:
                decay, index = decay_between(sums[filled], sums[thread]), t - filled + thread
                weight = key_product(k[t, key_head], k, cache.key_rows, index, begin, slot, thread, key_head) * decay
                m[thread] = weight if thread // SUB_BLOCK == filled // SUB_BLOCK else rounded(weight, q)
                weight = key_product(q[t, key_head], k, cache.key_rows, index, begin, slot, thread, key_head) * decay
                p[thread] = rounded(weight, q)
            since, value = decay_between(sums[filled], zero), zero
            source = k[t, key_head] if warp == 0 else q[t, key_head]
            for e in range(key_dim):
                value = cuda.fma(widen(source[e]), rounded(state[e * STRIDE + lane], q), value)
            cuda.syncthreads()
            if warp == 0:
                value = cuda.fma(-since, value, (widen(v[t, head, column]) if owned else zero) * scale) + zero
                for j in range(filled):
                    value = cuda.fma(-m[j], rows[j * STRIDE + lane], value)
                row = rounded(tokens.beta[t, head] * value, q)
                rows[filled * STRIDE + lane] = row
                if is_saved and owned:
                    saved.errors[t, head, column] = value * unscaled
                    saved.rows[t, head, column] = row * unscaled
                if is_paged and owned:
                    cache.value_rows[slot, filled, head, column] = narrow(row, cache.value_rows)
            cuda.syncthreads()
            if warp == 1:
                value = cuda.fma(since, value, zero)
                for j in range(filled + 1):
                    value = cuda.fma(p[j], rows[j * STRIDE + lane], value)
                if owned:
                    out[t, head, column] = narrow(rounded(value * unscaled, q), out)
            filled += 1
            cuda.syncthreads()

    return delta_rule_kernel


@cuda.jit
def store_open_block_kernel(k, log_decay, sequences, key_rows, decay_sums):
    """Keys and sums of each sequence's open block, into its slot: blocks of the rule's kernel read those before.

    A block of threads owns a sequence.
    """
    b = cuda.blockIdx.x
    begin, end = sequences.cu_seqlens[b], sequences.cu_seqlens[b + 1]
    if begin == end or sequences.context_lens[b] == 0:
        return
    slot, offset = sequences.slots[b], sequences.context_lens[b] - end
    first = max(begin, (end - 1 + offset) // BLOCK * BLOCK - offset)
    heads, key_dim = k.shape[1], k.shape[2]
    for t in range(first, end):
        for i in range(cuda.threadIdx.x, heads * key_dim, cuda.blockDim.x):
            key_rows[slot, (t + offset) % BLOCK, i // key_dim, i % key_dim] = k[t, i // key_dim, i % key_dim]
    for head in range(cuda.threadIdx.x, log_decay.shape[1], cuda.blockDim.x):
        row = (first + offset) % BLOCK
        total = decay_sums[slot, row - 1, head] if row > 0 else np.float32(0.0)
        for t in range(first, end):
            total += log_decay[t, head]
            decay_sums[slot, (t + offset) % BLOCK, head] = total


def _no_cache(operand):
    return StateCache(unused(5, operand), unused(4, operand), unused(4, operand), unused(3, np.float32))


def _no_values():
    return BlockValues(unused(4, np.float32), unused(3, np.float32), unused(3, np.float32))


def _launch(tokens, sequences, cache, saved, out):
    is_paged, is_saved = cache is not None, saved is not None
    kernel = delta_rule_kernel(tokens.k.shape[2], tokens.q.dtype != np.float32, is_paged, is_saved)
    grid = len(sequences.cu_seqlens) - 1, out.shape[1], -(-out.shape[2] // COLUMNS)
    saved, cache = saved or _no_values(), cache or _no_cache(tokens.q.dtype)
    launch(kernel, grid, THREADS, tokens, sequences, cache, saved, out)


def _packed(cu_seqlens):
    return StateSequences(cu_seqlens, unused(), unused(2), unused(), unused())


def delta_rule(tokens, cu_seqlens, out):
    """The operator delta_rule; the operator has checked the arguments."""
    _launch(tokens, _packed(cu_seqlens), None, None, out)


def paged_delta_rule(tokens, sequences, cache, out):
    """The operator paged_delta_rule; the operator has checked the arguments."""
    _launch(tokens, sequences, cache, None, out)
    store_open_block(tokens, sequences, cache)


def store_open_block(tokens, sequences, cache):
    """Write keys and sums of log decays of each sequence's open block to its slot, behind the rule's kernel."""
    rows = cache.key_rows, cache.decay_sums
    launch(store_open_block_kernel, len(sequences.slots), 128, tokens.k, tokens.log_decay, sequences, *rows)


def forward_of_blocks(tokens, cu_seqlens):
    """The BlockValues of packed sequences, by running the forward again."""
    empty, (rows, heads, value_dim) = device.xp().empty, tokens.v.shape
    blocks = rows // BLOCK + len(cu_seqlens) - 1
    states = empty((blocks, heads, tokens.k.shape[2], value_dim), np.float32)
    values = BlockValues(states, *(empty(tokens.v.shape, np.float32) for _ in range(2)))
    _launch(tokens, _packed(cu_seqlens), None, values, empty(tokens.v.shape, tokens.q.dtype))
    return values
