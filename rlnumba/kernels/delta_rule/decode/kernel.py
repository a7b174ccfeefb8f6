"""A decode step of linear attention as one kernel: convolution, norms, gates, the delta rule and the gated norm.

One token a sequence, heads of DIM columns, 16 bits. The bits are those that the tensor-core kernels of training and
prefill give the token (arithmetic.py), and those of delta_rule_inputs and gated_norm around them.

A block of threads owns a value head of a sequence, and a warp 32 columns of V of it. It reads the state's high plane
once, half of it into the registers of the threads that multiply it, and the open block's rows k and w, while the
kernels before it still run; makes q, k and v of its token meanwhile, and multiplies by mma.sync. Of A's sixteen lines
eight are k and eight are q, so that every lane has x and y of eight columns in its accumulators. -M w and P w of the
earlier sub-blocks are added to both at once; then a lane finishes one column alone. A full block is folded first: then
both planes are read and written, 16 rows of K at a time, whose accumulators are the next product's operands.

Latency bounds a step, not bytes: few instructions, and many blocks an SM, each with all of its loads under way.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, address, check, check_all
from rlnumba.kernels.delta_rule.arithmetic import BLOCK, SUB_BLOCK, VALUE_SCALE, check_state
from rlnumba.kernels.delta_rule.decode.products import (
    CHUNK,
    COLUMNS,
    DIM,
    HELD,
    KEYS,
    LINES,
    PITCH,
    SHARED_BYTES,
    STATE,
    THREADS,
    TOKEN,
    UNSCALED,
    VALUES,
    ZERO,
    first_row,
    fold_function,
    load_global_words,
    load_state_rows,
    products_functions,
    store_global_words,
)
from rlnumba.kernels.delta_rule.input_rows import TAPS, DeltaRuleHeads, accesses_of, gates_of, row_functions
from rlnumba.kernels.delta_rule.simt import decay_between, saturated, state_blocks
from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel
from rlnumba.kernels.ptx.shared_memory import (
    load_four,
    load_function,
    shared_address,
    store_function,
    store_words,
)
from rlnumba.kernels.ptx.warp import (
    PTX_TYPES,
    compiler_barrier,
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

store_shared_words = store_function("rr")
load_global_word, load_global_four_words = load_function("r", "global", "l"), load_function("rrrr", "global", "l")


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
def start_copies(base, sums, cache, slot, head, key_head, source, filled, thread):
    """Start the copies of the last rows of the state's high plane, of the block's rows k and w, and of G.

    source: the plane's address, 0 for zeros. The lines of w behind the rows, to the end of a sub-block, become zeros.
    """
    line, chunk = i32(thread >> i32(4)), i32((thread & i32(15)) * i32(CHUNK))
    target = base + line * i32(PITCH) + chunk
    nbytes = i32(CHUNK) if source != 0 else i32(0)
    for i in range((DIM - HELD) // LINES):
        place = source + (thread * i32(CHUNK) + i32((HELD + i * LINES) * 2 * DIM))
        sm80.cp_async_16(target + i32(2 * STATE + i * LINES * PITCH), place, nbytes)
    row = np.int64(slot) * BLOCK + line
    key_pitch, value_pitch = i32(cache.key_rows.shape[2]) * i32(2 * DIM), i32(cache.value_rows.shape[2]) * i32(2 * DIM)
    key = address_of(cache.key_rows) + row * key_pitch + (key_head * i32(2 * DIM) + chunk)
    value = address_of(cache.value_rows) + row * value_pitch + (head * i32(2 * DIM) + chunk)
    while line < filled:
        sm80.cp_async_16(target + i32(2 * KEYS), key, i32(CHUNK))
        sm80.cp_async_16(target + i32(2 * VALUES), value, i32(CHUNK))
        line, target = i32(line + i32(LINES)), target + i32(LINES * PITCH)
        key, value = key + key_pitch * i32(LINES), value + value_pitch * i32(LINES)
    if thread < filled:
        place = np.int64(slot) * BLOCK + thread
        place = address_of(cache.decay_sums) + (place * cache.decay_sums.shape[2] + head) * 4
        sm80.cp_async_4(sums + thread * i32(4), place, i32(4))
    sm80.cp_async_commit_group()
    # Behind a full block is no line of w, but the token's.
    zero, last = i32(0), i32(min(filled, i32(BLOCK - 1)) | i32(SUB_BLOCK - 1))
    while line <= last:
        store_words(target + i32(2 * VALUES), zero, zero, zero, zero)
        line, target = i32(line + i32(LINES)), target + i32(LINES * PITCH)


@specialize
def delta_rule_decode_kernel(heads, element, accesses):
    """The kernel for DeltaRuleHeads (a tuple) of a dtype's name."""
    heads = DeltaRuleHeads(*heads)
    key_heads, value_heads, channels, gates = heads.key_heads, heads.value_heads, heads.channels, heads.gates
    at_once, columns, held = min(accesses[0], 4) // 2, heads.columns, HELD // 2
    ratio, keys, query_scale = value_heads // key_heads, key_heads * DIM, f32(DIM**-0.5)
    _, _, _, _, activations, inverse_length = row_functions(DIM, element, accesses[0], accesses[2])
    score_tokens, read_state, finish = products_functions()
    fold = fold_function()
    wait_for_copies = sm80.cp_async_wait_group(0)

    load, unpack = load_function("rr" if accesses[0] >= 4 else "r", "global", "l"), cvt_unpack(element)
    pack = cvt_pack("float16")

    @device_function
    def load_token(window, address):
        """The new token's four channels."""
        if at_once == 2:
            window[6], window[7] = load(address)
        else:
            window[6], window[7] = load(address), load(address + 4)

    @device_function
    def load_taps(taps, address):
        """taps[2 i : 2 i + 2] = the weights of a lane's channel i."""
        for half in range(2):
            four = load_global_four_words(address + 16 * half)
            for i in range(4):
                taps[4 * half + i] = four[i]

    @device_function
    def load_window(window, conv, slot, table, start, resumed_at, channel):
        """window[2 tap : 2 tap + 2] = four channels of the three rows before the token."""
        ring = i32(conv.rows.shape[1])
        newest, rows = i32(np.uint32(start) % np.uint32(ring)), address_of(conv.rows) + channel * i32(2)
        rows += np.int64(slot) * (ring * i32(2 * channels))
        page_rows = address_of(conv.page_rows) + channel * i32(2)
        if 0 < resumed_at and start - i32(TAPS - 1) < resumed_at:
            page_rows += np.int64(table[np.uint32((resumed_at >> i32(6)) - i32(1))]) * (2 * channels * (TAPS - 1))
        for tap in range(TAPS - 1):
            before, place = i32(start + i32(tap - (TAPS - 1))), i32(newest + i32(tap - (TAPS - 1)))
            place = i32(place + ring) if place < 0 else place
            address = rows + place * i32(2 * channels)
            if before < resumed_at:
                address = page_rows + i32(before - resumed_at + i32(TAPS - 1)) * i32(2 * channels)
            window[2 * tap], window[2 * tap + 1] = i32(0), i32(0)
            if before >= 0:
                window[2 * tap], window[2 * tap + 1] = load_global_words(address)

    @device_function
    def keep_window(window, conv, slot, page, start, channel):
        """The token's row goes to the slot, and the three before a boundary to its page; -1: none."""
        if page >= 0:
            rows = address_of(conv.page_rows) + np.int64(page) * (2 * channels * (TAPS - 1)) + channel * i32(2)
            for tap in range(TAPS - 1):
                store_global_words(rows + 2 * channels * tap, window[2 * tap], window[2 * tap + 1])
        ring = np.uint32(conv.rows.shape[1])
        row = np.int64(slot) * i32(ring) + i32(np.uint32(start) % ring)
        store_global_words(address_of(conv.rows) + row * (2 * channels) + channel * i32(2), window[6], window[7])

    @supports_pdl
    @cuda.jit(launch_bounds=(THREADS, 4))
    def delta_rule_decode_kernel(projected, weights, norm, eps, sequences, cache, conv, arrivals, outputs):
        """A block of threads: (value head, sequence). norm: the gated norm's weight; arrivals: of Arrivals."""
        shared = cuda.shared.array(0, np.float16)
        base = shared_address(shared)
        sums, m, decays = (
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
        )
        values, o = cuda.shared.array(DIM, np.float32), cuda.shared.array(DIM, np.float32)
        gate, last = cuda.shared.array(2, np.float32), cuda.shared.array(1, np.int32)
        window_words, taps_words = cuda.local.array(8, np.int32), cuda.local.array(8, np.int32)
        window, taps, row = (
            cuda.local.array(16, np.float32),
            cuda.local.array(16, np.float32),
            cuda.local.array(4, np.float32),
        )
        acc, state = cuda.local.array(16, np.float32), cuda.local.array(held, np.int32)
        griddepcontrol_launch_dependents()
        head, b = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        thread = i32(cuda.threadIdx.x) & i32(THREADS - 1)
        lane, warp, key_head = thread & i32(31), thread >> i32(5), i32(head // i32(ratio))
        # By addresses: an array's index has code for negative ones.
        place = np.int64(b) * 4
        t = load_global_word(address_of(sequences.cu_seqlens) + place)
        next_t = load_global_word(address_of(sequences.cu_seqlens) + place + 4)
        context_len = load_global_word(address_of(sequences.context_lens) + place)
        resumed_at = load_global_word(address_of(sequences.resumed_at) + place)
        slot = load_global_word(address_of(sequences.slots) + place)
        if next_t == t:
            return
        if context_len == 0:
            griddepcontrol_wait()
            outputs.o[t, head, thread] = narrow(ZERO, outputs.o)
            outputs.gated[t, head, thread] = narrow(ZERO, outputs.gated)
            return
        start = i32(context_len - 1)
        table = sequences.state_tables[np.uint32(b)]
        blocks = i32(state_blocks(start, resumed_at))
        filled = i32(start - blocks * i32(BLOCK))
        is_full, page = filled == BLOCK, table[np.uint32(blocks - i32(1))] if blocks > 0 else i32(-1)
        next_page = table[np.uint32(blocks)] if is_full else i32(-1)
        planes = address_of(cache.states) + np.int64(head) * (4 * DIM * DIM)
        source = np.int64(0)
        if page >= 0:
            source = planes + np.int64(page) * (value_heads * 4 * DIM * DIM)
        g, c = lane >> i32(2), lane & i32(3)
        if not is_full:
            rows = first_row(source, 2 * DIM, warp, lane)
            for i in range(HELD // 2):
                state[i] = i32(0)
            if page >= 0:
                for step in range(HELD // 16):
                    load_state_rows(state, 8 * step, rows + step * 32 * DIM, 2 * DIM)
        elif page >= 0:
            # The fold reads both planes a few rows at a time.
            for i in range(4 * DIM * DIM // (THREADS * 128)):
                sm80.prefetch_l2(source + (thread + i32(i * THREADS)) * i32(128))
        start_copies(base, shared_address(sums), cache, slot, head, key_head, source, filled, thread)
        channel = i32(lane << i32(2))
        if warp < 2:
            channel += warp * i32(keys) + key_head * i32(DIM)
        else:
            channel += i32(2 * keys) + head * i32(DIM)
        if warp < 3:
            load_taps(taps_words, address_of(weights.conv) + channel * i32(2 * TAPS))
            load_window(window_words, conv, slot, table, start, resumed_at, channel)
        column = np.uint32(warp * i32(COLUMNS) + (c << i32(3)) + g)
        token, value_head = np.uint32(t), np.uint32(head)
        norm_weight, a_log, dt_bias = norm[column], weights.a_log[value_head], weights.dt_bias[value_head]
        compiler_barrier()
        griddepcontrol_wait()
        z = widen(projected[token, np.uint32(i32(channels) + head * i32(DIM)) + column])
        if warp < 3:
            load_token(window_words, address_of(projected) + (np.int64(t) * columns + channel) * 2)
            for i in range(8):
                window[2 * i], window[2 * i + 1] = unpack(window_words[i])
                taps[2 * i], taps[2 * i + 1] = unpack(taps_words[i])
            activations(window, taps, row)
            # The other value heads of a key head have the same q and k.
            if warp == 2 or head % ratio == 0:
                keep_window(window_words, conv, slot, next_page, start, channel)
            if warp == 2:
                for j in range(4):
                    values[np.uint32((lane << i32(2)) + i32(j))] = row[j] * VALUE_SCALE
            else:
                factor = inverse_length(row, lane)
                if warp == 0:
                    factor = factor * query_scale
                # Line 0 is k.
                target = base + i32(2 * TOKEN) + (i32(1) - warp) * i32(PITCH) + lane * i32(8)
                store_shared_words(
                    target, pack(row[0] * factor, row[1] * factor), pack(row[2] * factor, row[3] * factor)
                )
        elif lane == 0:
            raw, a = projected[token, gates + value_head], projected[token, gates + value_heads + value_head]
            beta, log_decay = gates_of(widen(raw), widen(a), widen(a_log), widen(dt_bias), projected)
            gate[0] = beta
            gate[1] = log_decay
        wait_for_copies()
        cuda.syncthreads()
        stores_key = head % ratio == 0
        for i in range(16):
            acc[i] = ZERO
        if is_full:
            if thread < BLOCK:
                decays[np.uint32(thread)] = decay_between(sums[BLOCK - 1], sums[np.uint32(thread)])
            if ratio > 1 and thread == 0:
                # The new key takes the place of one that other value heads fold: the last to have read it stores it.
                counter = b * i32(key_heads) + key_head
                last[0] = atomic_add_acq_rel(arrivals, counter)
                if last[0] == ratio - 1:
                    arrivals[counter] = i32(0)
            cuda.syncthreads()
            if ratio > 1:
                stores_key = last[0] == ratio - 1
            target = np.int64(0)
            if next_page >= 0:
                target = planes + np.int64(next_page) * (value_heads * 4 * DIM * DIM)
            fold(acc, base, decays, decay_between(sums[BLOCK - 1], ZERO), source, target, warp, lane)
            sync_warp()
            filled = i32(0)
        beta, total = gate[0], gate[1]
        if filled > 0:
            total = sums[np.uint32(filled - i32(1))] + total
        if warp * i32(SUB_BLOCK) <= filled:
            score_tokens(shared, base, sums, m, total, filled, warp, lane)
        if not is_full:
            read_state(acc, base, state, warp, lane)
        since = decay_between(total, ZERO)
        for odd in range(2):
            v = load_four(shared_address(values) + (warp * i32(COLUMNS) + (c << i32(3)) + i32(4 * odd)) * i32(4))
            for i in range(4):
                acc[4 * i + odd] = cuda.fma(-since, acc[4 * i + odd], v[i]) + ZERO
                acc[4 * i + 2 + odd] = cuda.fma(since, acc[4 * i + 2 + odd], ZERO)
        cuda.syncthreads()
        new, found = finish(acc, shared, base, m, beta, filled, warp, lane)
        slot, place = np.uint32(slot), np.uint32(filled)
        cache.value_rows[slot, place, value_head, column] = new
        rounded_output = narrow(saturated(found * UNSCALED), shared)
        outputs.o[token, value_head, column] = rounded_output
        output = widen(rounded_output)
        o[column] = output
        cuda.syncthreads()
        squares = ZERO
        for i in range(DIM // 32):
            each = o[np.uint32(lane + i32(32 * i))]
            squares = cuda.fma(each, each, squares)
        scale = inverse_sqrt(warp_sum(squares) / f32(DIM) + eps)
        outputs.gated[token, value_head, column] = narrow(
            output * scale * widen(norm_weight) * (z * sigmoid(z)), outputs.gated
        )
        if stores_key:
            cache.key_rows[slot, place, np.uint32(key_head), np.uint32(thread)] = shared[np.uint32(TOKEN + thread)]
        if thread == 0:
            outputs.rstd[token, value_head] = scale
            cache.decay_sums[slot, place, value_head] = total

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
    count = check_state(op, sequences, cache, (heads.key_heads, heads.value_heads, DIM, DIM), operand[0])
    _, ring, _ = check(op, "rows", conv.rows, (None, None, heads.channels), dtype)
    if ring < TAPS:
        raise ValueError(f"{op}: a slot of rows must have {TAPS} rows or more, got {ring}")
    check(op, "page_rows", conv.page_rows, (None, TAPS - 1, heads.channels), dtype)
    shape = rows, heads.value_heads, DIM
    check(op, "o", outputs.o, shape, operand)
    check(op, "gated", outputs.gated, shape, dtype)
    check(op, "rstd", outputs.rstd, shape[:2], F32)
    for array in (projected, weights.conv, *cache, *conv):
        if address(array) % CHUNK:
            raise ValueError(f"{op}: projected, conv and caches must begin at multiples of {CHUNK} bytes")
    accesses = accesses_of(heads, weights.conv, projected, conv.rows, conv.page_rows)
    kernel = delta_rule_decode_kernel(tuple(heads), element, accesses)
    arrivals = current().own(Arrivals).counters.first(count * heads.key_heads)
    launch(
        kernel, (heads.value_heads, count), THREADS, projected, weights, norm_weight, float(eps), sequences, cache,
        conv, arrivals, outputs, shared=SHARED_BYTES,
    )  # fmt: skip
