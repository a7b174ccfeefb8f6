"""The second kernel of tensor_backward.py: dq, dk and dlog_decay of all blocks at once, a value head each.

Two warps have 16 rows of the block, each half of the columns: of the products of tokens, of do w^T and of dr w^T, whose
sums over what crosses a token are made of prefix sums; then of do S^T, dr S^T and w dS^T, whose products with q and k
are what the states carry past a token.
"""

import functools

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK
from rlnumba.kernels.delta_rule.simt import decay_between
from rlnumba.kernels.delta_rule.tensor_tiles import (
    CHUNK,
    DIM,
    PITCH,
    ZERO,
    add_log_decays,
    convert_function,
    copy_function,
    fragment_functions,
)
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import load_word, shared_address, store_word
from rlnumba.kernels.ptx.warp import block_sum, cvt_pack, cvt_unpack, device_function, narrow, shuffle_xor
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32, f32 = np.int32, np.float32

THREADS = 256
# Shared memory in bytes: q, k, do, dr, w; S and dS; D dM and D dP as operands; then in floats what crosses tokens.
TILE, WEIGHT_PITCH = BLOCK * PITCH, 2 * BLOCK + CHUNK
Q, K, DO, DR, W = (i * TILE for i in range(5))
STATE = 5 * TILE
DSTATE = STATE + DIM * PITCH
DM = DSTATE + DIM * PITCH
DP = DM + BLOCK * WEIGHT_PITCH
SHARED_BYTES = DP + BLOCK * WEIGHT_PITCH
CROSSING_LINE, PARTS = BLOCK + 1, 2 * BLOCK

pack, unpack = cvt_pack("bfloat16"), cvt_unpack("bfloat16")


@functools.cache
def weights_function():
    """The device function of the block's weights and of their gradients: 16 rows and 32 columns of a warp."""
    load_a, _, load_b, _ = fragment_functions(PITCH)
    multiply, multiply_halves = sm80.mma("bfloat16"), sm80.mma("float16")

    @device_function
    def products(acc, base, rows, columns, is_half, first, column, lane):
        """acc (16, 32) = lines of one tile times lines of another."""
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        for i in range(16):
            acc[i] = ZERO
        for step in range(DIM // 16):
            load_a(a, base + i32(rows), first, i32(step * 16), lane)
            for n in range(2):
                load_b(b, base + i32(columns), i32(column + i32(n * 16)), i32(step * 16), lane)
                if is_half:
                    multiply_halves(acc, 8 * n, a, 0, b, 0)
                else:
                    multiply(acc, 8 * n, a, 0, b, 0)

    @device_function
    def make_gradients(base, sums, crossing, first, column, lane):
        """D dM and D dP as operands, and dP P + dM M in crossing."""
        output, error = cuda.local.array(16, np.float32), cuda.local.array(16, np.float32)
        doutput, derror = cuda.local.array(16, np.float32), cuda.local.array(16, np.float32)
        products(output, base, Q, K, True, first, column, lane)
        products(error, base, K, K, True, first, column, lane)
        products(doutput, base, DO, W, False, first, column, lane)
        products(derror, base, DR, W, False, first, column, lane)
        for half in range(2):
            t = i32(first + (lane >> i32(2)) + i32(8 * half))
            for n in range(4):
                j, at = i32(i32(column + i32(8 * n)) + ((lane & i32(3)) << i32(1))), 4 * n + 2 * half
                for i in range(2):
                    decay = decay_between(sums[t], sums[j + i]) if j + i <= t else ZERO
                    of_output = doutput[at + i] * decay if j + i <= t else ZERO
                    of_error = -derror[at + i] * decay if j + i < t else ZERO
                    crossing[t * CROSSING_LINE + j + i] = cuda.fma(of_output, output[at + i], of_error * error[at + i])
                    doutput[at + i], derror[at + i] = of_output, of_error
                place = t * i32(WEIGHT_PITCH) + j * i32(2)
                store_word(base + i32(DM) + place, pack(derror[at], derror[at + 1]))
                store_word(base + i32(DP) + place, pack(doutput[at], doutput[at + 1]))

    return make_gradients


@functools.cache
def gradient_functions():
    """(read_state, add_rows, dot_rows): the device functions of 16 rows and 64 columns of K of a warp."""
    load_a, _, load_b, load_b_trans = fragment_functions(PITCH)
    load_weights, load_weights_trans, _, _ = fragment_functions(WEIGHT_PITCH)
    multiply = sm80.mma("bfloat16")

    @device_function
    def read_state(acc, base, rows, state, low, high, first, column, lane):
        """acc = rows of a tile times a state's rows, times `low`, or `high` eight rows further."""
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        for i in range(32):
            acc[i] = ZERO
        for step in range(DIM // 16):
            load_a(a, base + i32(rows), first, i32(step * 16), lane)
            for n in range(4):
                load_b(b, base + i32(state), i32(column + i32(n * 16)), i32(step * 16), lane)
                multiply(acc, 8 * n, a, 0, b, 0)
        for n in range(8):
            for i in range(2):
                acc[4 * n + i] = acc[4 * n + i] * low
                acc[4 * n + 2 + i] = acc[4 * n + 2 + i] * high

    @device_function
    def add_rows(acc, base, weights, is_transposed, rows, first, column, lane):
        """acc += weights of the warp's rows, or of its columns, times the lines of a tile."""
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        for step in range(BLOCK // 16):
            if is_transposed:
                load_weights_trans(a, base + i32(weights), i32(step * 16), first, lane)
            else:
                load_weights(a, base + i32(weights), first, i32(step * 16), lane)
            for n in range(4):
                load_b_trans(b, base + i32(rows), i32(step * 16), i32(column + i32(n * 16)), lane)
                multiply(acc, 8 * n, a, 0, b, 0)

    @device_function
    def dot_row(acc, base, rows, half, first, column, lane):
        """The quad's sum of acc times a tile, of the row `first` + lane / 4 + 8 half."""
        place = base + i32(rows) + i32(first + (lane >> i32(2)) + i32(8 * half)) * i32(PITCH)
        place += (column + ((lane & i32(3)) << i32(1))) * i32(2)
        total = ZERO
        for n in range(8):
            left, right = unpack(load_word(place + n * CHUNK))
            total = cuda.fma(left, acc[4 * n + 2 * half], total)
            total = cuda.fma(right, acc[4 * n + 2 * half + 1], total)
        total += shuffle_xor(total, 1)
        total += shuffle_xor(total, 2)
        return total

    return read_state, add_rows, dot_row


@device_function
def store_gradient(acc, out, t, count, head, first, column, lane):
    """The warp's part of dq or dk; t: the block's first token."""
    for half in range(2):
        row = i32(first + (lane >> i32(2)) + i32(8 * half))
        if row < count:
            for n in range(8):
                e = i32(i32(column + i32(8 * n)) + ((lane & i32(3)) << i32(1)))
                out[t + row, head, e] = narrow(acc[4 * n + 2 * half], out)
                out[t + row, head, e + 1] = narrow(acc[4 * n + 2 * half + 1], out)


@device_function
def start_copies(base, dout, tokens, values, dv, dstates, copy_tile, where, thread):
    """Two groups: the tiles of tokens, of a block, head and key head; then the states."""
    block, head, key_head, first, count = where
    heads, key_heads = i32(dout.shape[1]), i32(tokens.k.shape[1])
    offset, row_bytes = (np.int64(first) * key_heads + key_head) * (2 * DIM), key_heads * i32(2 * DIM)
    copy_tile(base + i32(Q), address_of(tokens.q) + offset, row_bytes, count, thread)
    copy_tile(base + i32(K), address_of(tokens.k) + offset, row_bytes, count, thread)
    offset, row_bytes = (np.int64(first) * heads + head) * (2 * DIM), heads * i32(2 * DIM)
    copy_tile(base + i32(DO), address_of(dout) + offset, row_bytes, count, thread)
    copy_tile(base + i32(DR), address_of(dv) + offset, row_bytes, count, thread)
    copy_tile(base + i32(W), address_of(values.rows) + offset, row_bytes, count, thread)
    sm80.cp_async_commit_group()
    offset = (np.int64(block) * heads + head) * (2 * DIM * DIM)
    for half in range(2):
        lines, bytes_before = i32(half * BLOCK * PITCH), half * BLOCK * 2 * DIM
        copy_tile(
            base + i32(STATE) + lines,
            address_of(values.states) + offset + bytes_before,
            i32(2 * DIM),
            i32(BLOCK),
            thread,
        )
        copy_tile(
            base + i32(DSTATE) + lines, address_of(dstates) + offset + bytes_before, i32(2 * DIM), i32(BLOCK), thread
        )
    sm80.cp_async_commit_group()


@device_function
def store_dlog_decay(out, t, count, head, kept, crossing, of_row, of_column, thread):
    """dlog_decay of a thread's token; crossing: of each row the sums before each column."""
    if thread < count:
        total = kept
        for j in range(thread):
            total += of_column[j] + of_column[BLOCK + j]
        for turn in range(count - thread):
            i = count - 1 - turn
            total += of_row[i] + of_row[BLOCK + i]
        for i in range(thread, count):
            total += crossing[i * CROSSING_LINE + thread]
        out[t + thread, head] = total


copy_tile, convert_tile = copy_function(DIM, THREADS), convert_function(THREADS)
make_gradients = weights_function()
read_state, add_rows, dot_row = gradient_functions()
wait_for_tiles, wait_for_all = sm80.cp_async_wait_group(1), sm80.cp_async_wait_group(0)
CROSSING = BLOCK * CROSSING_LINE


@cuda.jit(launch_bounds=(THREADS, 1))
def delta_rule_block_backward_kernel(dout, tokens, bounds, values, dv, dstates, dq, dk, dlog_decay):
    """A block of threads: (value head, block of tokens). bounds (blocks, 2); dq, dk (N, HV, K)."""
    raw, sums = cuda.shared.array(BLOCK, np.float32), cuda.shared.array(BLOCK, np.float32)
    of_row, of_column = cuda.shared.array(PARTS, np.float32), cuda.shared.array(PARTS, np.float32)
    crossing, scratch = cuda.shared.array(CROSSING, np.float32), cuda.shared.array(8, np.float32)
    base = shared_address(cuda.shared.array(0, np.uint8))
    acc, other = cuda.local.array(32, np.float32), cuda.local.array(32, np.float32)
    thread = i32(cuda.threadIdx.x) & i32(THREADS - 1)
    lane, warp = thread & i32(31), thread >> i32(5)
    head, block = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
    t, count = i32(bounds[block, 0]), i32(bounds[block, 1])
    if count == 0:
        return
    key_head = i32(head // i32(i32(dout.shape[1]) // i32(tokens.k.shape[1])))
    where = block, head, key_head, t, count
    start_copies(base, dout, tokens, values, dv, dstates, copy_tile, where, thread)
    if warp == 0:
        add_log_decays(tokens.log_decay, t, count, head, raw, sums, lane)
    wait_for_tiles()
    cuda.syncthreads()
    first, part = (warp & i32(3)) * i32(16), warp >> i32(2)
    make_gradients(base, sums, crossing, first, part * i32(32), lane)
    cuda.syncthreads()
    convert_tile(base + i32(Q), thread)
    convert_tile(base + i32(K), thread)
    if thread < BLOCK:
        # The sums of a row before each column.
        total = ZERO
        for j in range(BLOCK):
            value = crossing[thread * CROSSING_LINE + j]
            crossing[thread * CROSSING_LINE + j] = total
            total += value
    wait_for_all()
    cuda.syncthreads()
    kept = ZERO
    for i in range(DIM * DIM // 2 // THREADS):
        word = i32(thread + i32(i * THREADS))
        place = (word >> i32(6)) * i32(PITCH) + (word & i32(63)) * i32(4)
        left, right = unpack(load_word(base + i32(STATE) + place))
        dleft, dright = unpack(load_word(base + i32(DSTATE) + place))
        kept = cuda.fma(right, dright, cuda.fma(left, dleft, kept))
    kept = block_sum(kept, scratch) * decay_between(sums[BLOCK - 1], ZERO)
    column, row = part * i32(64), i32(first + (lane >> i32(2)))
    low, high = decay_between(sums[row], ZERO), decay_between(sums[row + 8], ZERO)
    read_state(acc, base, DO, STATE, low, high, first, column, lane)
    low_sum, high_sum = dot_row(acc, base, Q, 0, first, column, lane), dot_row(acc, base, Q, 1, first, column, lane)
    add_rows(acc, base, DP, False, K, first, column, lane)
    store_gradient(acc, dq, t, count, head, first, column, lane)
    read_state(acc, base, DR, STATE, -low, -high, first, column, lane)
    low_sum += dot_row(acc, base, K, 0, first, column, lane)
    high_sum += dot_row(acc, base, K, 1, first, column, lane)
    low = decay_between(sums[BLOCK - 1], sums[row])
    high = decay_between(sums[BLOCK - 1], sums[row + 8])
    read_state(other, base, W, DSTATE, low, high, first, column, lane)
    low, high = dot_row(other, base, K, 0, first, column, lane), dot_row(other, base, K, 1, first, column, lane)
    if (lane & i32(3)) == 0:
        place = part * i32(BLOCK) + row
        of_row[place], of_row[place + 8] = low_sum, high_sum
        of_column[place], of_column[place + 8] = low, high
    for i in range(32):
        acc[i] += other[i]
    add_rows(acc, base, DM, False, K, first, column, lane)
    add_rows(acc, base, DM, True, K, first, column, lane)
    add_rows(acc, base, DP, True, Q, first, column, lane)
    store_gradient(acc, dk, t, count, head, first, column, lane)
    cuda.syncthreads()
    store_dlog_decay(dlog_decay, t, count, head, kept, crossing, of_row, of_column, thread)


def delta_rule_block_gradient(dout, tokens, bounds, values, dv, dstates, dkeys, dlog_decay):
    """Launch the kernel; dkeys: (dq, dk), each (N, HV, K); dout, dv, dstates and values bfloat16."""
    arguments = dout, tokens, bounds, values, dv, dstates, *dkeys, dlog_decay
    launch(delta_rule_block_backward_kernel, (dout.shape[1], len(bounds)), THREADS, *arguments, shared=SHARED_BYTES)
