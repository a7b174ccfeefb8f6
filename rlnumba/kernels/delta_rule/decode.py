"""A decode step of linear attention as one kernel: convolution, norms, gates, the delta rule and the gated norm.

One token a sequence, heads of DIM columns, 16 bits. The bits are those that the tensor-core kernels of training and
prefill give the token (arithmetic.py), and those of delta_rule_inputs and gated_norm around them.

A block of threads owns a value head of a sequence. It reads the state's high plane and the open block's rows k and w
once, into shared memory, while the kernels before it still run, makes q, k and v of its token meanwhile, and multiplies
by mma.sync. Of B's eight columns k is the first and q the second: a warp with 16 columns of V has x and y in its
accumulators, adds -M w and P w of the earlier sub-blocks to both at once, and finishes its columns alone. A full block
is folded first: then a warp has 16 rows of K of the state, and both planes are read and written.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, check_all, check_bounds
from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LARGEST_OPERAND, LOW_SCALE, SUB_BLOCK, VALUE_SCALE, planes_of
from rlnumba.kernels.delta_rule.input_rows import TAPS, DeltaRuleHeads, accesses_of, gates_of, row_functions
from rlnumba.kernels.delta_rule.simt import decay_between, state_blocks
from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel
from rlnumba.kernels.ptx.shared_memory import (
    ldmatrix_x4,
    load_function,
    load_word,
    shared_address,
    store_function,
    store_word,
)
from rlnumba.kernels.ptx.warp import (
    PTX_TYPES,
    cvt_pack,
    cvt_unpack,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    inverse_sqrt,
    narrow,
    sync_warp,
    warp_sum,
    widen,
)
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.growing_array import GrowingArray
from rlnumba.runtime.launch import launch, specialize, supports_pdl

i32, f32 = np.int32, np.float32

# K and V of the heads; threads of a block, of whose warps each has 16 columns of V.
DIM, THREADS = 128, 256
# Elements from one line of DIM operands to the next in shared memory, an odd number of 16 bytes, and the bytes of both.
LINE = DIM + 8
PITCH, CHUNK = 2 * LINE, sm80.CHUNK
# Elements before each part of shared memory: the state (K, V), rows k and w of the block, the token's k and q, and -M
# and P of the block's tokens.
KEYS = DIM * LINE
VALUES = KEYS + BLOCK * LINE
TOKEN = VALUES + BLOCK * LINE
WEIGHTS, WEIGHT_LINE = TOKEN + 2 * LINE, BLOCK + 8
SHARED_BYTES = 2 * (WEIGHTS + 2 * WEIGHT_LINE)
# Columns of V of the state that a warp folds at a time.
FOLD_COLUMNS = 32
UNSCALED, HIGH_SCALE = f32(1.0) / VALUE_SCALE, f32(1.0) / LOW_SCALE
ZERO = f32(0.0)

load_global_word, store_global_word = load_function("r", "global", "l"), store_function("r", "global", "l")


class DecodeOutputs(NamedTuple):
    """Outputs of a step beside the cache: o (N, HV, V) operands; gated (N, HV, V); rstd (N, HV) float32."""

    o: object
    gated: object
    rstd: object


class Arrivals:
    """Counters of one context, zero before and after a launch: value heads of a key head that have read its rows."""

    def __init__(self):
        self.counters = GrowingArray("attention", np.int32)


def is_supported(element, key_dim, value_dim):
    """Whether the kernel takes such heads, of a dtype's name."""
    return element in PTX_TYPES and key_dim == DIM and value_dim == DIM


@device_function
def load_lines_trans(words, lines, k, column, lane):
    """A fragment of A: 16 columns from `column` on, whose k are the 16 lines from k on; lines: address of line 0."""
    line = k + (lane & i32(7)) + ((lane >> i32(4)) << i32(3))
    sm80.ldmatrix_fragment_trans(
        words, 0, lines + line * i32(PITCH) + (column + (((lane >> i32(3)) & i32(1)) << i32(3))) * i32(2)
    )


@device_function
def load_columns(words, at, lines, pitch, k, lane):
    """The halves of two fragments of B, 32 k from k on: column n is line n % 2, so that every lane has both."""
    address = lines + (lane & i32(1)) * i32(pitch) + (k + ((lane >> i32(3)) << i32(3))) * i32(2)
    words[at], words[at + 1], words[at + 2], words[at + 3] = ldmatrix_x4(address)


@device_function
def saturated(value):
    """A float32 within the range of float16, but for NaN."""
    if value > LARGEST_OPERAND:
        value = LARGEST_OPERAND
    if value < -LARGEST_OPERAND:
        value = -LARGEST_OPERAND
    return value


@device_function
def start_copies(base, cache, slot, head, key_head, page, filled, thread):
    """Start the copies of the state's high plane, zeros without a page, and of the block's rows k and w, and zeros of w
    behind them.
    """
    state = address_of(cache.states) + np.int64(max(page, i32(0)) * cache.states.shape[1] + head) * (4 * DIM * DIM)
    line, chunk = thread >> i32(4), thread & i32(15)
    target = base + line * i32(PITCH) + chunk * i32(CHUNK)
    nbytes = i32(CHUNK) if page >= 0 else i32(0)
    for i in range(DIM // 16):
        sm80.cp_async_16(target + i * 16 * PITCH, state + thread * i32(CHUNK) + i * 32 * DIM, nbytes)
    row = np.int64(slot) * BLOCK + line
    key = address_of(cache.key_rows) + (row * cache.key_rows.shape[2] + key_head) * (2 * DIM) + chunk * i32(CHUNK)
    value = address_of(cache.value_rows) + (row * cache.value_rows.shape[2] + head) * (2 * DIM) + chunk * i32(CHUNK)
    for i in range(BLOCK // 16):
        row_line = i32(line + i32(i * 16))
        if row_line < filled:
            source = key + np.int64(cache.key_rows.shape[2]) * (i * 32 * DIM)
            sm80.cp_async_16(target + 2 * KEYS + i * 16 * PITCH, source, i32(CHUNK))
        if row_line <= i32(filled | i32(SUB_BLOCK - 1)):
            source = value + np.int64(cache.value_rows.shape[2]) * (i * 32 * DIM)
            nbytes = i32(CHUNK) if row_line < filled else i32(0)
            sm80.cp_async_16(target + 2 * VALUES + i * 16 * PITCH, source if row_line < filled else value, nbytes)
    sm80.cp_async_commit_group()


@functools.cache
def fold_function():
    """The device function that folds a full block into the state."""
    pack, unpack, multiply = cvt_pack("float16"), cvt_unpack("float16"), sm80.mma("float16")
    count = FOLD_COLUMNS // 2

    @device_function
    def fold(base, kept, low_source, high_target, low_target, warp, lane):
        """The state in shared memory becomes E_last S + k^T (F w); F w is in the lines of w.

        Addresses of a head's planes: the low one of the page that is read, both of the page that is written; 0: none.
        """
        acc = cuda.local.array(count, np.float32)
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        line, pair = i32(warp * i32(16)) + (lane >> i32(2)), (lane & i32(3)) << i32(1)
        for group in range(DIM // FOLD_COLUMNS):
            for n in range(FOLD_COLUMNS // 8):
                for half in range(2):
                    element = i32(line + i32(8 * half)) * i32(DIM) + group * FOLD_COLUMNS + n * 8 + pair
                    column = i32(group * FOLD_COLUMNS + n * 8) + pair
                    address = base + i32(line + i32(8 * half)) * i32(PITCH) + column * i32(2)
                    high_first, high_second = unpack(load_word(address))
                    low_first, low_second = ZERO, ZERO
                    if low_source != 0:
                        low_first, low_second = unpack(load_global_word(low_source + np.int64(element) * 2))
                    at = 4 * n + 2 * half
                    acc[at] = cuda.fma(kept, cuda.fma(low_first, HIGH_SCALE, high_first), ZERO)
                    acc[at + 1] = cuda.fma(kept, cuda.fma(low_second, HIGH_SCALE, high_second), ZERO)
            for step in range(BLOCK // 16):
                load_lines_trans(a, base + i32(2 * KEYS), i32(step * 16), i32(warp * i32(16)), lane)
                for n in range(FOLD_COLUMNS // 16):
                    row = i32(step * 16) + (lane & i32(15))
                    column = i32(group * FOLD_COLUMNS + n * 16) + ((lane >> i32(4)) << i32(3))
                    sm80.ldmatrix_fragment_trans(b, 0, base + i32(2 * VALUES) + row * i32(PITCH) + column * i32(2))
                    multiply(acc, 8 * n, a, 0, b, 0)
            for n in range(FOLD_COLUMNS // 8):
                for half in range(2):
                    at, column = 4 * n + 2 * half, i32(group * FOLD_COLUMNS + n * 8) + pair
                    high = pack(saturated(acc[at]), saturated(acc[at + 1]))
                    store_word(base + i32(line + i32(8 * half)) * i32(PITCH) + column * i32(2), high)
                    if high_target != 0:
                        element = np.int64(i32(line + i32(8 * half)) * i32(DIM) + column) * 2
                        high_first, high_second = unpack(high)
                        low_first = saturated((acc[at] - high_first) * LOW_SCALE)
                        low_second = saturated((acc[at + 1] - high_second) * LOW_SCALE)
                        store_global_word(high_target + element, high)
                        store_global_word(low_target + element, pack(low_first, low_second))

    return fold


@functools.cache
def products_functions():
    """(load_token, score_tokens, read_state, finish): the device functions of a warp's products for one token."""
    multiply = sm80.mma_half("float16")

    @device_function
    def load_token(columns, base, lane):
        """The words of k and q, as columns of B."""
        for step in range(DIM // 32):
            load_columns(columns, 4 * step, base + i32(2 * TOKEN), PITCH, i32(step * 32), lane)

    @device_function
    def score_tokens(shared, base, columns, sums, m, total, filled, warp, lane):
        """M in m, and -M of earlier sub-blocks and P as operands, of the block's tokens 16 warp to 16 warp + 15."""
        acc, a = cuda.local.array(4, np.float32), cuda.local.array(4, np.int32)
        for i in range(4):
            acc[i] = ZERO
        line = base + i32(2 * KEYS) + i32(warp * i32(16) + (lane & i32(15))) * i32(PITCH)
        line += (lane >> i32(4)) * i32(CHUNK)
        for step in range(DIM // 16):
            sm80.ldmatrix_fragment(a, 0, line + step * 32)
            multiply(acc, 0, a, 0, columns, 2 * step)
        if (lane & i32(3)) == 0:
            for half in range(2):
                j = i32(i32(warp * i32(16) + (lane >> i32(2))) + i32(8 * half))
                error, output = ZERO, ZERO
                if j <= filled:
                    decay = decay_between(total, sums[j] if j < filled else total)
                    output = decay * acc[2 * half + 1]
                    if j < filled:
                        error = decay * acc[2 * half]
                m[j] = error
                shared[WEIGHTS + j] = narrow(saturated(-error), shared)
                shared[WEIGHTS + WEIGHT_LINE + j] = narrow(saturated(output), shared)

    @device_function
    def read_state(acc, base, columns, warp, lane):
        """acc[0], acc[1] = x and y of a lane's first column of V, acc[2], acc[3] of its second, 8 further."""
        a = cuda.local.array(4, np.int32)
        for i in range(4):
            acc[i] = ZERO
        for step in range(DIM // 16):
            load_lines_trans(a, base, i32(step * 16), i32(warp * i32(16)), lane)
            multiply(acc, 0, a, 0, columns, 2 * step)

    @device_function
    def finish(acc, shared, base, m, values, beta, total, filled, warp, lane):
        """From x and y to w, which goes to its line, and in acc[1] and acc[3] the outputs of a lane's columns."""
        a, weights = cuda.local.array(4, np.int32), cuda.local.array(8, np.int32)
        column, since = i32(warp * i32(16)) + (lane >> i32(2)), decay_between(total, ZERO)
        for half in range(2):
            acc[2 * half] = cuda.fma(-since, acc[2 * half], values[column + i32(8 * half)]) + ZERO
            acc[2 * half + 1] = cuda.fma(since, acc[2 * half + 1], ZERO)
        for step in range(BLOCK // 32):
            load_columns(weights, 4 * step, base + i32(2 * WEIGHTS), 2 * WEIGHT_LINE, i32(step * 32), lane)
        own = i32(filled >> i32(4))
        for step in range(BLOCK // 16 - 1):
            if step < own:
                load_lines_trans(a, base + i32(2 * VALUES), i32(step * 16), i32(warp * i32(16)), lane)
                multiply(acc, 0, a, 0, weights, 2 * step)
        first, second = acc[0], acc[2]
        j, line = i32(own * i32(SUB_BLOCK)), i32(own * i32(SUB_BLOCK * LINE)) + column
        while j < filled:
            weight, place = -m[np.uint32(j)], np.uint32(VALUES + line)
            first = cuda.fma(weight, widen(shared[place]), first)
            second = cuda.fma(weight, widen(shared[np.uint32(place + 8)]), second)
            j, line = i32(j + i32(1)), i32(line + i32(LINE))
        if (lane & i32(3)) == 0:
            line = VALUES + filled * LINE + column
            shared[line] = narrow(saturated(beta * first), shared)
            shared[line + 8] = narrow(saturated(beta * second), shared)
        sync_warp()
        # What column 0 adds up now is not read.
        load_lines_trans(a, base + i32(2 * VALUES), i32(own * i32(SUB_BLOCK)), i32(warp * i32(16)), lane)
        for step in range(BLOCK // 16):
            if step == own:
                multiply(acc, 0, a, 0, weights, 2 * step)

    return load_token, score_tokens, read_state, finish


@specialize
def delta_rule_decode_kernel(heads, element, accesses):
    """The kernel for DeltaRuleHeads (a tuple) of a dtype's name."""
    heads = DeltaRuleHeads(*heads)
    key_heads, value_heads, channels, gates = heads.key_heads, heads.value_heads, heads.channels, heads.gates
    ratio, keys, query_scale = value_heads // key_heads, key_heads * DIM, f32(DIM**-0.5)
    load, store, load_taps, activations, inverse_length = row_functions(DIM, element, accesses[0], accesses[2])
    load_token, score_tokens, read_state, finish = products_functions()
    fold = fold_function()
    wait_for_copies = sm80.cp_async_wait_group(0)

    @device_function
    def load_window(window, conv, slot, table, start, resumed_at, channel):
        """The three rows before the token."""
        for tap in range(TAPS - 1):
            before = i32(start + i32(tap - (TAPS - 1)))
            if before < 0:
                for j in range(4):
                    window[4 * tap + j] = ZERO
            elif before < resumed_at:
                source = table[resumed_at // BLOCK - 1]
                load(conv.page_rows[source, before - resumed_at + TAPS - 1], channel, window, 4 * tap)
            else:
                load(conv.rows[slot, before % conv.rows.shape[1]], channel, window, 4 * tap)

    @device_function
    def keep_window(window, conv, slot, page, start, channel):
        """The token's row goes to the slot, and the three before a boundary to its page; -1: none."""
        if page >= 0:
            for tap in range(TAPS - 1):
                store(conv.page_rows[page, tap], channel, window, 4 * tap)
        store(conv.rows[slot, start % conv.rows.shape[1]], channel, window, 4 * (TAPS - 1))

    @supports_pdl
    @cuda.jit(launch_bounds=(THREADS, 3))
    def delta_rule_decode_kernel(projected, weights, norm, eps, sequences, cache, conv, arrivals, outputs):
        """A block of threads: (value head, sequence). norm: the gated norm's weight; arrivals: of Arrivals."""
        shared = cuda.shared.array(0, np.float16)
        base = shared_address(shared)
        sums, m = cuda.shared.array(BLOCK, np.float32), cuda.shared.array(BLOCK, np.float32)
        values, o = cuda.shared.array(DIM, np.float32), cuda.shared.array(DIM, np.float32)
        gate, last = cuda.shared.array(2, np.float32), cuda.shared.array(1, np.int32)
        window, taps, row = (
            cuda.local.array(16, np.float32),
            cuda.local.array(16, np.float32),
            cuda.local.array(4, np.float32),
        )
        acc, columns = cuda.local.array(4, np.float32), cuda.local.array(16, np.int32)
        griddepcontrol_launch_dependents()
        head, b = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        thread = i32(cuda.threadIdx.x) & i32(THREADS - 1)
        lane, warp, key_head = thread & i32(31), thread >> i32(5), i32(head // i32(ratio))
        t, next_t, context_len = sequences.cu_seqlens[b], sequences.cu_seqlens[b + 1], sequences.context_lens[b]
        resumed_at, slot = sequences.resumed_at[b], sequences.slots[b]
        if next_t == t:
            return
        if context_len == 0:
            griddepcontrol_wait()
            if thread < DIM:
                outputs.o[t, head, thread] = narrow(ZERO, outputs.o)
                outputs.gated[t, head, thread] = narrow(ZERO, outputs.gated)
            return
        start = i32(context_len - 1)
        table = sequences.state_tables[b]
        blocks = i32(state_blocks(start, resumed_at))
        filled = i32(start - blocks * i32(BLOCK))
        is_full, page = filled == BLOCK, table[blocks - 1] if blocks > 0 else i32(-1)
        next_page = table[blocks] if is_full else i32(-1)
        start_copies(base, cache, slot, head, key_head, page, filled, thread)
        if thread < filled:
            sums[thread] = cache.decay_sums[slot, thread, head]
        channel = 4 * lane
        if warp < 2:
            channel += warp * i32(keys) + key_head * i32(DIM)
        else:
            channel += i32(2 * keys) + head * i32(DIM)
        if warp < 3:
            load_taps(weights.conv, channel, taps)
            load_window(window, conv, slot, table, start, resumed_at, channel)
        norm_weight = widen(norm[thread & i32(DIM - 1)])
        griddepcontrol_wait()
        z = widen(projected[t, channels + head * DIM + (thread & i32(DIM - 1))])
        if warp < 3:
            load(projected[t], channel, window, 4 * (TAPS - 1))
            activations(window, taps, row)
            # The other value heads of a key head have the same q and k.
            if warp == 2 or head % ratio == 0:
                keep_window(window, conv, slot, next_page, start, channel)
            if warp == 2:
                for j in range(4):
                    values[4 * lane + j] = row[j] * VALUE_SCALE
            else:
                factor = inverse_length(row, lane)
                if warp == 0:
                    factor = factor * query_scale
                for j in range(4):
                    # Column 0 of B is k.
                    operand = narrow(row[j] * factor, shared)
                    shared[TOKEN + (1 - warp) * LINE + 4 * lane + j] = operand
                    if warp == 1 and filled < BLOCK:
                        shared[KEYS + filled * LINE + 4 * lane + j] = operand
        elif warp == 3 and lane == 0:
            raw, a = widen(projected[t, gates + head]), widen(projected[t, gates + value_heads + head])
            beta, log_decay = gates_of(raw, a, widen(weights.a_log[head]), widen(weights.dt_bias[head]), projected)
            gate[0] = beta
            gate[1] = log_decay
        wait_for_copies()
        cuda.syncthreads()
        stores_key = head % ratio == 0
        if is_full:
            if thread < BLOCK:
                m[thread] = decay_between(sums[BLOCK - 1], sums[thread])
            if ratio > 1 and thread == 0:
                # The new key takes the place of one that other value heads fold: the last to have read it stores it.
                counter = b * i32(key_heads) + key_head
                last[0] = atomic_add_acq_rel(arrivals, counter)
                if last[0] == ratio - 1:
                    arrivals[counter] = i32(0)
            cuda.syncthreads()
            if ratio > 1:
                stores_key = last[0] == ratio - 1
            for index in range(thread, BLOCK * DIM, THREADS):
                place = VALUES + (index >> 7) * LINE + (index & (DIM - 1))
                shared[place] = narrow(saturated(m[index >> 7] * widen(shared[place])), shared)
            cuda.syncthreads()
            plane, planes = np.int64(2 * DIM * DIM), np.int64(4 * DIM * DIM)
            low_source, high_target = np.int64(0), np.int64(0)
            if page >= 0:
                low_source = address_of(cache.states) + np.int64(page * value_heads + head) * planes + plane
            if next_page >= 0:
                high_target = address_of(cache.states) + np.int64(next_page * value_heads + head) * planes
            fold(base, decay_between(sums[BLOCK - 1], ZERO), low_source, high_target, high_target + plane, warp, lane)
            cuda.syncthreads()
            for index in range(thread, SUB_BLOCK * DIM, THREADS):
                shared[VALUES + (index >> 7) * LINE + (index & (DIM - 1))] = narrow(ZERO, shared)
            if thread < DIM:
                shared[KEYS + thread] = shared[TOKEN + thread]
            filled = i32(0)
            cuda.syncthreads()
        beta, total = gate[0], gate[1]
        if filled > 0:
            total = sums[filled - 1] + total
        load_token(columns, base, lane)
        read_state(acc, base, columns, warp, lane)
        if warp < 4 and warp * i32(16) <= filled:
            score_tokens(shared, base, columns, sums, m, total, filled, warp, lane)
        cuda.syncthreads()
        finish(acc, shared, base, m, values, beta, total, filled, warp, lane)
        if (lane & i32(3)) == 0:
            for half in range(2):
                rounded_output = narrow(saturated(acc[2 * half + 1] * UNSCALED), shared)
                o[warp * i32(16) + (lane >> i32(2)) + i32(8 * half)] = widen(rounded_output)
        cuda.syncthreads()
        squares = ZERO
        for i in range(DIM // 32):
            squares = cuda.fma(o[i * 32 + lane], o[i * 32 + lane], squares)
        scale = inverse_sqrt(warp_sum(squares) / f32(DIM) + eps)
        column = thread & i32(DIM - 1)
        if thread < DIM:
            outputs.o[t, head, column] = narrow(o[column], outputs.o)
            outputs.gated[t, head, column] = narrow(o[column] * scale * norm_weight * (z * sigmoid(z)), outputs.gated)
        else:
            cache.value_rows[slot, filled, head, column] = shared[VALUES + filled * LINE + column]
            if stores_key:
                cache.key_rows[slot, filled, key_head, column] = shared[TOKEN + column]
        if thread == 0:
            outputs.rstd[t, head] = scale
            cache.decay_sums[slot, filled, head] = total

    return delta_rule_decode_kernel


def delta_rule_decode(projected, weights, norm, heads, sequences, cache, conv, outputs):
    """A step of one token a sequence, from the projection of linear attention to its gated output.

    projected (N, columns) of 16 bits; weights: InputWeights; norm: (the gated norm's weight (V,), eps); heads:
    DeltaRuleHeads, for which is_supported; sequences: StateSequences of at most one token each; cache: StateCache and
    conv: ConvCache, read and written; outputs: DecodeOutputs, written. Raises ValueError for other shapes, dtypes or
    layouts.
    """
    op, element, (norm_weight, eps) = "delta_rule_decode", projected.dtype.name, norm
    if not is_supported(element, heads.key_dim, heads.value_dim):
        raise ValueError(f"{op}: heads must have {DIM} columns of 16 bits, got {heads} of {element}")
    rows, _ = check(op, "projected", projected, (None, heads.columns), (projected.dtype,))
    dtype, operand = (projected.dtype,), (np.dtype(np.float16),)
    check(op, "conv", weights.conv, (heads.channels, TAPS), dtype)
    check_all(op, (heads.value_heads,), dtype, a_log=weights.a_log, dt_bias=weights.dt_bias)
    check(op, "norm", norm_weight, (DIM,), dtype)
    count = check_bounds(op, "cu_seqlens", sequences.cu_seqlens)
    places = {"context_lens": sequences.context_lens, "slots": sequences.slots, "resumed_at": sequences.resumed_at}
    check_all(op, (count,), I32, **places)
    check(op, "state_tables", sequences.state_tables, (count, None), I32)
    check(op, "states", cache.states, (None, heads.value_heads, planes_of(np.float16), DIM, DIM), operand)
    slots, *_ = check(op, "key_rows", cache.key_rows, (None, BLOCK, heads.key_heads, DIM), operand)
    check(op, "value_rows", cache.value_rows, (slots, BLOCK, heads.value_heads, DIM), operand)
    check(op, "decay_sums", cache.decay_sums, (slots, BLOCK, heads.value_heads), F32)
    _, ring, _ = check(op, "rows", conv.rows, (None, None, heads.channels), dtype)
    if ring < TAPS:
        raise ValueError(f"{op}: a slot of rows must have {TAPS} rows or more, got {ring}")
    check(op, "page_rows", conv.page_rows, (None, TAPS - 1, heads.channels), dtype)
    shape = rows, heads.value_heads, DIM
    check(op, "o", outputs.o, shape, operand)
    check(op, "gated", outputs.gated, shape, dtype)
    check(op, "rstd", outputs.rstd, shape[:2], F32)
    accesses = accesses_of(heads, weights.conv, projected, conv.rows, conv.page_rows)
    kernel = delta_rule_decode_kernel(tuple(heads), element, accesses)
    arrivals = current().own(Arrivals).counters.first(count * heads.key_heads)
    launch(
        kernel, (heads.value_heads, count), THREADS, projected, weights, norm_weight, float(eps), sequences, cache,
        conv, arrivals, outputs, shared=SHARED_BYTES,
    )  # fmt: skip
