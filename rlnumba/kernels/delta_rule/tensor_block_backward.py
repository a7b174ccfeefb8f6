"""The last kernel of the gradient on tensor cores: dq, dk, dv, dbeta and dlog_decay of all blocks at once.

A block of threads has a key head: q and k, and their products, serve its value heads, whose dq and dk are added up in
registers. Two warps have 16 rows of the block, each half of the columns: of the products of tokens, of do r^T and of
z r^T, whose sums over what crosses a token are made of prefix sums; then of do S^T, z S^T and r dS^T, whose products
with q and k are what the states carry past a token. r, z and states lie as the chains have them, transposed.
"""

import functools

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK
from rlnumba.kernels.delta_rule.simt import decay_between
from rlnumba.kernels.delta_rule.tensor_inverse import VECTORS
from rlnumba.kernels.delta_rule.tensor_products import opaque
from rlnumba.kernels.delta_rule.tensor_tiles import (
    CHUNK,
    COLUMNS_PITCH,
    DIM,
    PITCH,
    ZERO,
    convert_function,
    copy_function,
    fragment_functions,
    multiply_keys_function,
    store_rows,
)
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import load_word, shared_address, store_word
from rlnumba.kernels.ptx.warp import block_sum, cvt_pack, cvt_unpack, device_function, shuffle_up, shuffle_xor
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, i64, f32 = np.int32, np.int64, np.float32

THREADS = 256
# Shared memory in bytes: q, k, do; r and z, transposed; S and dS; D dM and D dP as operands.
TILE, COLUMN_TILE = BLOCK * PITCH, DIM * COLUMNS_PITCH
Q, K, DO = (i * TILE for i in range(3))
R, Z = 3 * TILE, 3 * TILE + COLUMN_TILE
STATE = Z + COLUMN_TILE
DSTATE = STATE + DIM * PITCH
DM = DSTATE + DIM * PITCH
DP = DM + BLOCK * COLUMNS_PITCH
SHARED_BYTES = DP + BLOCK * COLUMNS_PITCH
# In floats: a line of products and of what crosses tokens; sums of the columns' halves.
CROSSING_LINE, PARTS = BLOCK + 1, 2 * BLOCK
CROSSING, SEGMENT = BLOCK * CROSSING_LINE, BLOCK // (THREADS // BLOCK)
OF_TOKENS = VECTORS * BLOCK
# In OF_TOKENS: E, F and beta, behind G.
SINCE, LATER, BETA = BLOCK, 2 * BLOCK, 3 * BLOCK
# Sums of a token that warps or segments make, added up in their order.
WARPS, SUMS = THREADS // 32, THREADS // 32 * BLOCK

pack, unpack = cvt_pack("bfloat16"), cvt_unpack("bfloat16")


@functools.cache
def weights_functions(is_alone):
    """(keep_products, make_gradients): of the block's weights and their gradients, 16 rows and 32 columns of a warp."""
    load_a, _, _, _ = fragment_functions(PITCH)
    _, load_a_trans, _, load_b_trans = fragment_functions(COLUMNS_PITCH)
    multiply, multiply_keys = sm80.mma("bfloat16"), multiply_keys_function(32)

    @device_function
    def keep_products(products, base, rows, first, column, lane):
        """products = those of multiply_keys: q . k on the diagonal and below, k . k, transposed, above it."""
        acc = cuda.local.array(16, np.float32)
        multiply_keys(acc, base, rows, K, first, column, lane)
        for half in range(2):
            t = i32(first + (lane >> i32(2)) + i32(8 * half))
            for n in range(4):
                for i in range(2):
                    j = i32(i32(column + i32(8 * n + i)) + ((lane & i32(3)) << i32(1)))
                    if rows == Q and j <= t:
                        products[t * CROSSING_LINE + j] = acc[4 * n + 2 * half + i]
                    if rows == K and j < t:
                        products[j * CROSSING_LINE + t] = acc[4 * n + 2 * half + i]

    @device_function
    def multiply_rows(output, error, base, first, column, lane):
        """do r^T and z r^T."""
        a, other = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        b = cuda.local.array(4, np.int32)
        for i in range(16):
            output[i], error[i] = ZERO, ZERO
        for step in range(DIM // 16):
            load_a(a, base + i32(DO), first, i32(step * 16), lane)
            load_a_trans(other, base + i32(Z), i32(step * 16), first, lane)
            for n in range(2):
                load_b_trans(b, base + i32(R), i32(step * 16), i32(column + i32(n * 16)), lane)
                multiply(output, 8 * n, a, 0, b, 0)
                multiply(error, 8 * n, other, 0, b, 0)

    @device_function
    def make_gradients(products, base, of_tokens, crossing, first, column, lane):
        """D dM and D dP as operands, and dP P + dM M in crossing. products: of keep_products, by the same threads."""
        outputs, errors = cuda.local.array(16, np.float32), cuda.local.array(16, np.float32)
        doutput, derror = cuda.local.array(16, np.float32), cuda.local.array(16, np.float32)
        if is_alone:
            multiply_keys(outputs, base, Q, K, first, column, lane)
            multiply_keys(errors, base, K, K, first, column, lane)
        multiply_rows(doutput, derror, base, first, column, lane)
        for half in range(2):
            t = i32(first + (lane >> i32(2)) + i32(8 * half))
            total, of_row = of_tokens[t], -of_tokens[BETA + t]
            for n in range(4):
                j, at = i32(i32(column + i32(8 * n)) + ((lane & i32(3)) << i32(1))), 4 * n + 2 * half
                for i in range(2):
                    decay = decay_between(total, of_tokens[j + i]) if j + i <= t else ZERO
                    decay *= of_tokens[BETA + j + i]
                    of_output = doutput[at + i] * decay if j + i <= t else ZERO
                    of_error = derror[at + i] * (of_row * decay) if j + i < t else ZERO
                    # M and P have no beta, which is in the rows.
                    if is_alone:
                        output, error = outputs[at + i], errors[at + i]
                    else:
                        output = products[t * CROSSING_LINE + j + i] if j + i <= t else ZERO
                        error = products[(j + i) * CROSSING_LINE + t] if j + i < t else ZERO
                    crossing[t * CROSSING_LINE + j + i] = cuda.fma(of_output, output, of_error * error)
                    doutput[at + i], derror[at + i] = of_output, of_error
                place = t * i32(COLUMNS_PITCH) + j * i32(2)
                store_word(base + i32(DM) + place, pack(derror[at], derror[at + 1]))
                store_word(base + i32(DP) + place, pack(doutput[at], doutput[at + 1]))

    return keep_products, make_gradients


@functools.cache
def gradient_functions():
    """(read_rows, read_columns, add_rows, dot_row): the device functions of 16 rows and 64 columns of K of a warp."""
    load_a, _, _, load_b_trans = fragment_functions(PITCH)
    load_weights, load_a_trans, _, _ = fragment_functions(COLUMNS_PITCH)
    multiply = sm80.mma("bfloat16")

    @device_function
    def read_state(acc, base, tile, is_transposed, state, low, high, first, column, lane):
        """acc = rows of a tile times a state, times `low`, or `high` eight rows further."""
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        for i in range(32):
            acc[i] = ZERO
        for step in range(DIM // 16):
            if is_transposed:
                load_a_trans(a, base + i32(tile), i32(step * 16), first, lane)
            else:
                load_a(a, base + i32(tile), first, i32(step * 16), lane)
            for n in range(4):
                load_b_trans(b, base + i32(state), i32(step * 16), i32(column + i32(n * 16)), lane)
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
                load_a_trans(a, base + i32(weights), i32(step * 16), first, lane)
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

    @device_function
    def store_values(base, dv, of_tokens, t, count, head, first, column, lane):
        """dv = beta z of 16 rows and 64 columns of V."""
        words, a = cuda.local.array(8, np.int32), cuda.local.array(4, np.int32)
        row, row_bytes = i32(first + (lane >> i32(2))), i64(dv.shape[1]) * (2 * DIM)
        low, high = of_tokens[BETA + row], of_tokens[BETA + row + 8]
        to = address_of(dv) + i64(t + first) * row_bytes + head * i32(2 * DIM) + column * i32(2)
        for two in range(2):
            for step in range(2):
                load_a_trans(a, base + i32(Z), i32(column + i32(32 * two + 16 * step)), first, lane)
                for i in range(4):
                    scale = high if i & 1 else low
                    left, right = unpack(a[i])
                    words[4 * step + i] = pack(scale * left, scale * right)
            store_rows(words, to + 64 * two, row_bytes, i32(count - first), lane)

    return read_state, add_rows, dot_row, store_values


@device_function
def store_gradient(acc, out, t, count, head, first, column, lane):
    """A warp's part of dq or dk; t: the block's first token."""
    words, row_bytes = cuda.local.array(8, np.int32), i64(out.shape[1]) * (2 * DIM)
    to = address_of(out) + i64(t + first) * row_bytes + (head * i32(DIM) + column) * i32(2)
    for two in range(2):
        for i in range(8):
            words[i] = pack(acc[16 * two + 2 * i], acc[16 * two + 2 * i + 1])
        store_rows(words, to + 64 * two, row_bytes, i32(count - first), lane)


@device_function
def add_to(totals, acc, is_first):
    """totals = acc, or += acc."""
    for i in range(32):
        totals[i] = acc[i] if is_first else totals[i] + acc[i]


copy_tile, copy_columns = copy_function(DIM, THREADS), copy_function(BLOCK, THREADS)


@device_function
def start_key_copies(base, tokens, block_bounds, key_head, thread):
    """Start the copies of q and k of a block, (first token, tokens), and of a key head."""
    (first, count), key_heads = block_bounds, i32(tokens.k.shape[1])
    offset, row_bytes = (i64(first) * key_heads + key_head) * (2 * DIM), key_heads * i32(2 * DIM)
    copy_tile(base + i32(Q), address_of(tokens.q) + offset, row_bytes, count, thread)
    copy_tile(base + i32(K), address_of(tokens.k) + offset, row_bytes, count, thread)


@device_function
def start_value_copies(base, of_tokens, dout, vectors, values, block, block_bounds, head, thread):
    """Start the copies of a block and value head, in two groups: do, r, z and the vectors; both states."""
    (first, count), heads = block_bounds, i32(dout.shape[1])
    offset, row_bytes = (i64(first) * heads + head) * (2 * DIM), heads * i32(2 * DIM)
    copy_tile(base + i32(DO), address_of(dout) + offset, row_bytes, count, thread)
    at = i64(block) * heads + head
    for half in range(2):
        to, offset = i32(half * BLOCK * COLUMNS_PITCH), at * (2 * DIM * BLOCK) + half * 2 * BLOCK * BLOCK
        copy_columns(base + i32(R) + to, address_of(values.errors) + offset, i32(2 * BLOCK), i32(BLOCK), thread)
        copy_columns(base + i32(Z) + to, address_of(values.z) + offset, i32(2 * BLOCK), i32(BLOCK), thread)
    if thread < OF_TOKENS // 4:
        source = address_of(vectors) + at * (4 * OF_TOKENS) + thread * i32(CHUNK)
        sm80.cp_async_16(of_tokens + thread * i32(CHUNK), source, i32(CHUNK))
    sm80.cp_async_commit_group()
    for half in range(2):
        to, offset = i32(half * BLOCK * PITCH), at * (2 * DIM * DIM) + half * 2 * BLOCK * DIM
        copy_tile(base + i32(STATE) + to, address_of(values.states) + offset, i32(2 * DIM), i32(BLOCK), thread)
        copy_tile(base + i32(DSTATE) + to, address_of(values.dstates) + offset, i32(2 * DIM), i32(BLOCK), thread)
    sm80.cp_async_commit_group()


@device_function
def add_crossing(crossing, thread):
    """Replace each row by the sums before its columns; neighbouring threads have the segments of a row."""
    values = cuda.local.array(SEGMENT, np.float32)
    row, segment = thread >> i32(2), thread & i32(3)
    first = row * i32(CROSSING_LINE) + segment * i32(SEGMENT)
    total = ZERO
    for i in range(SEGMENT):
        values[i] = crossing[first + i]
        total += values[i]
    before = ZERO
    for i in range(1, 4):
        earlier = shuffle_up(total, i)
        if segment >= i:
            before = earlier + before
    for i in range(SEGMENT):
        crossing[first + i] = before
        before += values[i]


@device_function
def add_beta(base, sums, thread):
    """In sums: of two tokens z . r, over a warp's part of V."""
    left, right = ZERO, ZERO
    warp, lane = thread >> i32(5), thread & i32(31)
    place = base + warp * i32(DIM // WARPS * COLUMNS_PITCH) + lane * i32(4)
    for i in range(DIM // WARPS):
        r, next_r = unpack(load_word(place + i32(R + i * COLUMNS_PITCH)))
        z, next_z = unpack(load_word(place + i32(Z + i * COLUMNS_PITCH)))
        left, right = cuda.fma(z, r, left), cuda.fma(next_z, next_r, right)
    sums[warp * i32(BLOCK) + lane * i32(2)] = left
    sums[warp * i32(BLOCK) + lane * i32(2) + 1] = right


@device_function
def add_parts_of(sums, count, thread):
    total = sums[thread]
    for i in range(1, count):
        total += sums[i * BLOCK + thread]
    return total


@device_function
def add_log_decay(sums, crossing, of_row, of_column, thread):
    """In sums: what crosses a token, of a segment of tokens."""
    t, segment = thread & i32(BLOCK - 1), thread >> i32(6)
    total = ZERO
    for turn in range(SEGMENT):
        i = i32(segment * i32(SEGMENT)) + i32(turn)
        if i < t:
            total += of_column[i] + of_column[BLOCK + i]
        else:
            total += of_row[i] + of_row[BLOCK + i] + crossing[i * CROSSING_LINE + t]
    sums[thread] = total


@device_function
def multiply_states(base, thread):
    """A thread's part of the product of S and dS."""
    total = ZERO
    for i in range(DIM * DIM // 2 // THREADS):
        word = i32(thread + i32(i * THREADS))
        place = (word >> i32(6)) * i32(PITCH) + (word & i32(63)) * i32(4)
        left, right = unpack(load_word(base + i32(STATE) + place))
        dleft, dright = unpack(load_word(base + i32(DSTATE) + place))
        total = cuda.fma(right, dright, cuda.fma(left, dleft, total))
    return total


convert_tile = convert_function(DIM, THREADS)
read_state, add_rows, dot_row, store_values = gradient_functions()
wait_for_tiles, wait_for_all = sm80.cp_async_wait_group(1), sm80.cp_async_wait_group(0)


@specialize
def delta_rule_block_backward_kernel(is_alone):
    """The kernel; is_alone: each key head has one value head, whose products and sums no other one needs.

    H100, 16,384 tokens of 64 sequences, 16 key heads: with 16 value heads 548 us where the sums and products are kept
    and read again, as 32 need it, which take 946.
    """
    keep_products, make_gradients = weights_functions(is_alone)
    products_size = 1 if is_alone else CROSSING

    @cuda.jit(launch_bounds=(THREADS, 1))
    def delta_rule_block_backward_kernel(dout, tokens, bounds, vectors, values, gradients):
        """A block of threads: (key head, block of tokens), the value heads of the key head one after another.

        bounds (blocks, 2); vectors: of delta_rule_inverse; values: ChainValues; gradients: Tokens, which are written: q
        and k the sums of the value heads, in ascending order. What the next head needs is copied as soon as nothing
        else reads its place.
        """
        of_tokens, sums = cuda.shared.array(OF_TOKENS, np.float32), cuda.shared.array(SUMS, np.float32)
        of_row, of_column = cuda.shared.array(PARTS, np.float32), cuda.shared.array(PARTS, np.float32)
        crossing, scratch = cuda.shared.array(CROSSING, np.float32), cuda.shared.array(8, np.float32)
        products = cuda.shared.array(products_size, np.float32)
        shared = shared_address(cuda.shared.array(0, np.uint8))
        vectors_place = shared_address(of_tokens)
        acc, other = cuda.local.array(32, np.float32), cuda.local.array(32, np.float32)
        dq, dk = cuda.local.array(32, np.float32), cuda.local.array(32, np.float32)
        thread = i32(cuda.threadIdx.x) & i32(THREADS - 1)
        key_head, block = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        t, count = i32(bounds[block, 0]), i32(bounds[block, 1])
        if count == 0:
            return
        ratio = i32(dout.shape[1]) // i32(tokens.k.shape[1])
        head, last = key_head * ratio, i32(key_head * ratio + ratio)
        start_key_copies(shared, tokens, (t, count), key_head, thread)
        start_value_copies(shared, vectors_place, dout, vectors, values, block, (t, count), head, thread)
        is_first = True
        while True:
            # All addresses of shared memory are the same for each head: they would be kept, in too many registers.
            base = shared if is_alone else opaque(shared)
            thread = thread if is_alone else opaque(thread)
            lane, warp = thread & i32(31), thread >> i32(5)
            first, part = (warp & i32(3)) * i32(16), warp >> i32(2)
            column, row = part * i32(64), i32(first + (lane >> i32(2)))
            following = i32(head + i32(1))
            is_last = is_alone or following == last
            wait_for_tiles()
            cuda.syncthreads()
            if is_first and not is_alone:
                keep_products(products, base, Q, first, part * i32(32), lane)
                keep_products(products, base, K, first, part * i32(32), lane)
            make_gradients(products, base, of_tokens, crossing, first, part * i32(32), lane)
            add_beta(base, sums, thread)
            store_values(base, gradients.v, of_tokens, t, count, head, first, column, lane)
            cuda.syncthreads()
            if thread < count:
                gradients.beta[t + thread, head] = add_parts_of(sums, WARPS, thread)
            if is_first:
                convert_tile(base + i32(Q), thread)
                convert_tile(base + i32(K), thread)
            add_crossing(crossing, thread)
            wait_for_all()
            cuda.syncthreads()
            kept = block_sum(multiply_states(base, thread), scratch) * of_tokens[SINCE + BLOCK - 1]
            low, high = of_tokens[SINCE + row], of_tokens[SINCE + row + 8]
            read_state(acc, base, DO, False, STATE, low, high, first, column, lane)
            low_sum, high_sum = (
                dot_row(acc, base, Q, 0, first, column, lane),
                dot_row(acc, base, Q, 1, first, column, lane),
            )
            add_rows(acc, base, DP, False, K, first, column, lane)
            add_to(dq, acc, is_first)
            if is_last:
                store_gradient(dq, gradients.q, t, count, key_head, first, column, lane)
            low, high = -low * of_tokens[BETA + row], -high * of_tokens[BETA + row + 8]
            read_state(acc, base, Z, True, STATE, low, high, first, column, lane)
            low_sum += dot_row(acc, base, K, 0, first, column, lane)
            high_sum += dot_row(acc, base, K, 1, first, column, lane)
            low = of_tokens[LATER + row] * of_tokens[BETA + row]
            high = of_tokens[LATER + row + 8] * of_tokens[BETA + row + 8]
            read_state(other, base, R, True, DSTATE, low, high, first, column, lane)
            low, high = dot_row(other, base, K, 0, first, column, lane), dot_row(other, base, K, 1, first, column, lane)
            if (lane & i32(3)) == 0:
                place = part * i32(BLOCK) + row
                of_row[place], of_row[place + 8] = low_sum, high_sum
                of_column[place], of_column[place + 8] = low, high
            for i in range(32):
                acc[i] += other[i]
            cuda.syncthreads()
            # All threads have read do, r, z, the vectors and the states.
            if not is_last:
                start_value_copies(base, vectors_place, dout, vectors, values, block, (t, count), following, thread)
            add_rows(acc, base, DM, False, K, first, column, lane)
            add_rows(acc, base, DM, True, K, first, column, lane)
            add_rows(acc, base, DP, True, Q, first, column, lane)
            add_to(dk, acc, is_first)
            add_log_decay(sums, crossing, of_row, of_column, thread)
            cuda.syncthreads()
            if thread < count:
                gradients.log_decay[t + thread, head] = kept + add_parts_of(sums, THREADS // BLOCK, thread)
            if is_last:
                break
            head, is_first = following, False
        store_gradient(dk, gradients.k, t, count, key_head, first, column, lane)

    return delta_rule_block_backward_kernel


def delta_rule_block_gradient(dout, tokens, bounds, vectors, values, gradients):
    """Launch the kernel."""
    grid = tokens.k.shape[1], len(bounds)
    arguments = dout, tokens, bounds, vectors, values, gradients
    kernel = delta_rule_block_backward_kernel(dout.shape[1] == tokens.k.shape[1])
    launch(kernel, grid, THREADS, *arguments, shared=SHARED_BYTES)
